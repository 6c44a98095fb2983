"""Shards that FSDP2 keeps of a group: of its trained parameters, and of its frozen ones.

They are tensors apart: the optimizer has states of the former alone, and only of them the original
format has to be one (`FSDPParamGroup._init_mp_dtypes`, torch 2.13), so that the latter can be
loaded in the format in which they are computed with.
"""

from zsim.model.model import Model
from zsim.zero.bucket import Bucket, Buckets, Place, bucket_of


def shards(model: Model, groups: Buckets, *, place: Place, ranks: int) -> Buckets:
    """A bucket for each group, or one of what is trained and one of what is frozen of it.

    They have the number of their group.
    """
    found = [part for group in groups.all for part in _parts(model, group, place, ranks)]
    return Buckets(all=tuple(found), runs=())


def _parts(model: Model, group: Bucket, place: Place, ranks: int) -> list[Bucket]:
    members = {each.name: each for each in model.parameters}
    own = [members[piece.parameter] for piece in group.layout.pieces]
    kinds = [[each for each in own if each.frozen is frozen] for frozen in (False, True)]
    if not all(kinds):
        return [group]
    return [
        bucket_of(
            model,
            group.index,
            kind,
            placed=place(kind),
            ranks=ranks,
            units=group.units,
            name="bucket" if kind[0].frozen else "trained_bucket",
        )
        for kind in kinds
    ]
