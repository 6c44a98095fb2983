"""Profiles as TOML files: one for each kind of GPU, with the systems that were measured.

Constants of the GPU and its links are shared by all its systems; a system has only the constants
that its hosts, network and software change. `zsim calibrate` writes these files.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from zsim.cluster.profile.network import NetworkProfile, ProfileError

KEYS = frozenset(
    {"gpu", "scaled_from", "publications", "errors", "constants", "systems", "fabrics"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """Constants of one kind of GPU.

    Attributes:
        gpu: the kind, such as "h100".
        shared: constants fitted to all systems together, for unknown systems.
        systems: constants fitted to each system, by name.
        publications: publications of the fitted rows.
        fabrics: systems that were measured on many nodes, the least congested first.
        scaled_from: GPU whose constants replace those never measured on this one; None if none.
        errors: relative errors by name, on fitted and on held-out rows.
    """

    gpu: str
    shared: NetworkProfile
    systems: Mapping[str, NetworkProfile]
    publications: tuple[str, ...] = ()
    fabrics: tuple[str, ...] = ()
    scaled_from: str | None = None
    errors: Mapping[str, float]

    def of(self, system: str | None) -> NetworkProfile:
        """Return the constants of `system`, or the shared ones if it is unknown."""
        return self.systems.get(system or "", self.shared)


def text(profiles: Profiles) -> str:
    """Return the file, in TOML."""
    lines = [
        "# Written by `zsim calibrate --from DIR`. Do not edit: calibrate again.",
        f'gpu = "{profiles.gpu}"',
        *([f'scaled_from = "{profiles.scaled_from}"'] if profiles.scaled_from else []),
        "publications = [",
        *(f"    {_quoted(each)}," for each in profiles.publications),
        "]",
        *([f"fabrics = [{', '.join(map(_quoted, profiles.fabrics))}]"] if profiles.fabrics else []),
        "",
        "[errors]",
        *(f"{name} = {value:.4f}" for name, value in profiles.errors.items()),
        "",
        "[constants]",
        *_constants(profiles.shared, profiles.shared.numbers),
    ]
    for name, system in sorted(profiles.systems.items()):
        differs = [each for each in system.numbers if _differs(system, profiles.shared, each)]
        lines += ["", f"[systems.{_quoted(name)}]", *_constants(system, differs)]
    return "\n".join(lines) + "\n"


def _constants(profile: NetworkProfile, names: Iterable[str]) -> list[str]:
    return [f"{name} = {profile[name]:.4g}" for name in names]


def _differs(one: NetworkProfile, other: NetworkProfile, name: str) -> bool:
    there = other.numbers.get(name)
    return there is None or f"{one[name]:.4g}" != f"{there:.4g}"


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def parse(
    name: str, table: Mapping[str, object], check: Callable[[NetworkProfile], None]
) -> Profiles:
    """Return the profiles in a file that was read as `table`; `name` is for messages.

    `check` raises ProfileError for invalid constants (`zsim.network` defines them).

    Raises:
        ProfileError: a key or constant is missing, unknown or invalid.
    """
    unknown = sorted(set(table) - KEYS)
    if unknown:
        raise ProfileError(f"{name}: {unknown[0]} is not a key of a profile")
    gpu, publications = table.get("gpu"), table.get("publications", [])
    if not isinstance(gpu, str) or not isinstance(publications, list):
        raise ProfileError(f"{name}: gpu must be a name and publications a list")
    nearest = table.get("scaled_from")
    if nearest is not None and not isinstance(nearest, str):
        raise ProfileError(f"{name}: scaled_from must be the name of a GPU")
    fabrics = table.get("fabrics", [])
    if not isinstance(fabrics, list) or not set(fabrics) <= set(_table(name, table, "systems")):
        raise ProfileError(f"{name}: fabrics must be a list of systems")
    numbers = _numbers(name, table, "constants")
    shared = _profile(name, "constants", NetworkProfile(numbers, gpu), check)
    systems = _table(name, table, "systems")
    known = {
        str(each): _profile(
            name,
            each,
            NetworkProfile({**numbers, **_numbers(name, systems, each)}, f"{gpu}/{each}"),
            check,
        )
        for each in systems
    }
    return Profiles(
        gpu=gpu,
        shared=shared,
        systems=known,
        publications=tuple(str(each) for each in publications),
        fabrics=tuple(str(each) for each in fabrics),
        scaled_from=nearest,
        errors=_numbers(name, table, "errors"),
    )


def _table(name: str, table: Mapping[str, object], key: str) -> Mapping[str, object]:
    found = table.get(key, {})
    if not isinstance(found, dict):
        raise ProfileError(f"{name}: {key} must be a table")
    return found


def _profile(
    name: str, label: str, found: NetworkProfile, check: Callable[[NetworkProfile], None]
) -> NetworkProfile:
    try:
        check(found)
    except ProfileError as error:
        raise ProfileError(f"{name}: {label}: {error}") from None
    return found


def _numbers(name: str, table: Mapping[str, object], key: str) -> dict[str, float]:
    found = table.get(key)
    if not isinstance(found, dict):
        raise ProfileError(f"{name}: {key} must be a table of numbers")
    numbers: dict[str, float] = {}
    for each, value in found.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ProfileError(f"{name}: {key}: {each} must be a number")
        numbers[str(each)] = float(value)
    return numbers
