"""Commands of apps: packages register them as entry points of the group `zsim.commands`."""

import subprocess
import sys
from pathlib import Path

APP = '''"""Greets."""

from zsim.cli.option import Code


def greet(name: str) -> Code:
    """Greet somebody."""
    print(f"hello {name}")
    return Code.DONE
'''


def installed(folder: Path, entry: str) -> None:
    """Lay a package with a command into `folder`, as an installer would."""
    (folder / "greeting.py").write_text(APP, "utf-8")
    metadata = folder / "greeting-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[zsim.commands]\n{entry}\n")


def zsim(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); sys.argv[0] = 'zsim'\n"
    program += "from zsim.cli.main import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )


def test_a_package_of_others_adds_a_command(tmp_path: Path) -> None:
    installed(tmp_path, "greet = greeting:greet")
    assert zsim(tmp_path, "greet", "Ada").stdout == "hello Ada\n"
    assert "greet      Greet somebody." in zsim(tmp_path, "--help").stdout


def test_a_command_that_two_packages_register_is_refused_in_one_line(tmp_path: Path) -> None:
    installed(tmp_path, "run = greeting:greet")
    failed = zsim(tmp_path, "--help")
    assert failed.returncode == 2
    assert failed.stderr == (
        "zsim: zsim.commands: 'run' is registered more than once; remove one of the packages\n"
    )
