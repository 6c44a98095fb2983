"""The end of a step in DeepSpeed: a norm for each group, always, and their sum.

`step` asks for `scaled_global_norm` whether it clips or not, in every stage (DeepSpeed 0.19).
Groups are sub-groups in stage 3, and groups of parameters before it.
"""

from zsim.schedule.operation import Copy
from zsim.zero.optimizer_step import Ending
from zsim.zero.writer import COMPUTE, Draft


class MeasuredGroups(Ending):
    """An ending whose norms are reduced one number after the other (`get_grad_norm_direct`).

    DeepSpeed reduces each over the data axis and then over the tensor axis, here it is one group of
    both.
    """

    def _norm(self, draft: Draft) -> str | None:
        names = ["norm", *(f"norm{number}" for number in range(1, len(self.trained)))]
        for name, item in zip(names, self.trained, strict=True):
            self._measure_norm(draft, name, (item,))
        for name in names[1:]:
            draft.add(
                Copy(
                    id=draft.path(f"norm/add/{name}"),
                    stream=COMPUTE,
                    source=draft.all(name),
                    target=draft.all(names[0]),
                    accumulate=True,
                )
            )
            draft.free(name)
        if self.strategy.clip_norm is None:
            draft.free(names[0])
            return None
        return names[0]
