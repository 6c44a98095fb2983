"""A mutant of the executor of real ranks: one small change of the text of one function.

A change that does not apply any more, or applies twice, fails. `hint` names the run that is judged
first. Where no judge can tell a mutant from the executor, `same` says why.
"""

import inspect
import textwrap
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from unittest.mock import patch

STAGE_0, STAGE_1, STAGE_2, STAGE_3 = "stage 0", "stage 1 replicas", "stage 2 fp16", "stage 3"
OFFLOAD, DEFERRED = "stage 3 offload", "fsdp1"
CROSSED, PINNED = "by hand", "threads by hand"
VALUES, NVME = "values", "values from files"
PLAIN = "values without poison"
CALLER = "with a caller"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A function of `owner` in which `old` is `new`."""

    name: str
    hint: str
    owner: Any
    function: str
    old: str
    new: str
    same: str = ""

    @contextmanager
    def planted(self) -> Generator[None]:
        """Let the executor be wrong inside."""
        right = inspect.getattr_static(self.owner, self.function)
        assert isinstance(right, FunctionType)
        text = textwrap.dedent(inspect.getsource(right))
        assert text.count(self.old) == 1, f"{self.name}: the change applies {text.count(self.old)}"
        made: dict[str, Any] = {}
        changed = compile(text.replace(self.old, self.new), inspect.getfile(right), "exec")
        exec(changed, right.__globals__, made)
        with patch.object(self.owner, self.function, made[self.function]):
            yield
