"""A cluster: its parts, its bandwidths, and its picture."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from zsim.api.answer import AnswerInFacts
from zsim.api.gpu_fleet import gpu_fleet
from zsim.api.host_facts import host_facts, host_object
from zsim.api.notebook import Picture
from zsim.api.scenario import Changed, as_settings
from zsim.cluster.bisection import Cut, cuts, narrowest
from zsim.cluster.cluster import Cluster, ClusterError
from zsim.cluster.files import Part, TopologyError
from zsim.cluster.files.edges_csv import edges_text
from zsim.cluster.links import LinkClass, link_classes, summed_up
from zsim.config_error import line
from zsim.dtype import BlockFormat
from zsim.files.installed import part_names, topology, usual_nodes
from zsim.files.output_file import write
from zsim.files.picture import need_format, write_picture
from zsim.mistake import MistakeError, mistakes
from zsim.report.svg.cluster_drawing import draw
from zsim.report.svg.note import rate, speed
from zsim.scenario.sized_cluster import with_overrides
from zsim.scenario.tables import ClusterTable, ScenarioError
from zsim.scenario.title import title_of
from zsim.scenario.toml import with_settings
from zsim.strategy.config_table import Count, Ratio, Repeat, Size, Table
from zsim.suggestion import one_of
from zsim.units import format_bytes, format_rate

ONE_SWITCH = "single_switch"
"""Default fabric of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyResult(AnswerInFacts):
    """A cluster and its bandwidths.

    Attributes:
        title: name of the cluster, with the changes made to it.
        cluster: the cluster.
        cuts: levels at which it can be cut in two, with the bandwidth across each cut.
    """

    title: str
    cluster: Cluster = field(repr=False)
    cuts: tuple[Cut, ...] = field(repr=False)

    @property
    def narrowest(self) -> Cut | None:
        """The cut with the least bandwidth per GPU; None if the cluster cannot be cut."""
        return narrowest(self.cuts) if self.cuts else None

    def facts(self) -> list[tuple[str, str]]:
        """Return names and texts of its parts and bandwidths."""
        return list(_facts(self.cluster, self.cuts))

    def picture(self, path: str | PathLike[str] | None = None) -> Picture:
        """Draw the cluster; write the picture to `path` (.svg, .png or .pdf) if given.

        Raises:
            MistakeError: PNG and PDF need the extra `draw`.
            UnwrittenError: the file cannot be written.
        """
        drawn = draw(self.cluster, self.narrowest)
        if path is not None:
            need_format("picture", Path(path))
            write_picture("picture", Path(path), drawn)
        return Picture(drawn)

    def save_links(self, path: str | PathLike[str]) -> None:
        """Write the links between nodes and switches to `path`, as CSV that a fabric may be.

        Raises:
            MistakeError: the fabric has tiers of switches, or one switch, and no list of links.
            UnwrittenError: the file cannot be written.
        """
        fabric = self.cluster.fabric
        if not fabric.edges:
            raise MistakeError(
                f"--links: {fabric.kind} has no list of links; a torus, a dragonfly and a CSV "
                "have one"
            )
        write(Path(path), edges_text(fabric.edges))

    def to_dict(self) -> dict[str, object]:
        """Return the object that `zsim topology --json` prints."""
        cluster, narrow = self.cluster, self.narrowest
        return {
            "name": cluster.name,
            "nodes": cluster.nodes,
            "gpus": cluster.ranks,
            "gpus_per_node": cluster.gpus_per_node,
            "nics_per_node": cluster.nics_per_node,
            "nodes_per_domain": cluster.nodes_per_domain,
            "gpu": cluster.gpu.name,
            "gpu_memory_bytes": cluster.gpu.memory_bytes,
            **host_object(cluster),
            "fabric": cluster.fabric.kind.name,
            "tiers": [
                {
                    "name": tier.name,
                    "nodes_below": tier.nodes_below,
                    "oversubscription": float(tier.oversubscription),
                }
                for tier in cluster.fabric.tiers
            ],
            "links": [_link_object(each) for each in summed_up(link_classes(cluster))],
            "bisection_bytes_per_s": self.cuts[-1].bytes_per_s if self.cuts else None,
            "narrowest_cut": None if narrow is None else _cut_object(narrow),
            "cuts": [_cut_object(cut) for cut in self.cuts],
            "sources": dict(cluster.cites),
        }


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # too long, or a null character
        return False


COUNTED_FILE = re.compile(r"[0-9]+[xX].+\.(?:toml|xml)", re.ASCII | re.IGNORECASE)
"""A number of GPUs of a file, such as "8xmine.toml"."""


def _named_by_gpus(name: str, nodes: int) -> tuple[str, int]:
    """Return the node and number of nodes of GPUs such as "8xh100"; other names are unchanged."""
    if name in (*part_names(Part.SYSTEM), *part_names(Part.NODE)):
        return name, nodes
    if Path(name).suffix and (COUNTED_FILE.fullmatch(name) is None or _exists(name)):
        return name, nodes
    try:
        fleet = gpu_fleet(name)
    except MistakeError:  # refused by the caller, with the names of topologies
        return name, nodes
    return fleet.node, max(nodes, -(-fleet.gpus // fleet.cluster.gpus_per_node))


def read_topology(
    name: str, *, nodes: int = 1, fabric: str | None = None, changes: Changed = None
) -> TopologyResult:
    """Return a packaged cluster, or one described in a file, with its bandwidths.

    Args:
        name: name or file of a system or a node, or a GPU as `--gpus` of `best` names it.
        nodes: number of nodes.
        fabric: fabric between nodes; default a single switch.
        changes: values by key as in a scenario: `{"cluster.oversubscription": 2}`.

    Raises:
        MistakeError: the cluster does not exist, or a change is invalid.
    """
    name, nodes = _named_by_gpus(name, nodes)
    if fabric is None and (name in part_names(Part.NODE) or name.endswith(".xml")):
        fabric = ONE_SWITCH
    if fabric is None and name not in part_names(Part.SYSTEM) and not name.endswith(".toml"):
        known = (*part_names(Part.SYSTEM), *part_names(Part.NODE))
        or_else, listed_by = "a file (.toml, .xml), or ", "zsim list topologies or zsim list nodes"
        known = (*known, *usual_nodes())
        bare = re.sub(r"^[0-9]+x(?=.)", "", name, flags=re.IGNORECASE)
        raise MistakeError(f"name: {one_of(bare, known, or_else=or_else, listed_by=listed_by)}")
    if fabric is not None and name in part_names(Part.SYSTEM):
        raise MistakeError(f"--fabric: {name} is a node on a fabric already")
    settings = as_settings(changes)
    with mistakes(TopologyError, ClusterError, ScenarioError):
        table = _changed(settings)
        used = table.nodes_per_domain
        cluster = topology(name, fabric, table.nodes or nodes, table.gpu, nodes_per_domain=used)
        changed = with_overrides(ClusterTable().model_copy(update=dict(table)), cluster)
    cluster = replace(changed, name=title_of(cluster.name, {}, settings))
    return TopologyResult(title=cluster.name, cluster=cluster, cuts=cuts(cluster))


class _ClusterSettings(Table):
    """Keys of a topology that `--set` can change, as in a scenario."""

    nodes: Count | None = None
    gpu: str | None = None
    gpu_memory: Size | None = None
    nics_per_node: Repeat | None = None
    nodes_per_domain: Count | None = None
    drives: Repeat | None = None
    oversubscription: Ratio | None = None


class _Settings(Table):
    """Tables that `--set` can change."""

    cluster: _ClusterSettings = _ClusterSettings()


def _changed(settings: tuple[str, ...]) -> _ClusterSettings:
    """Return the values of `settings` such as `cluster.oversubscription=2`.

    Raises:
        ScenarioError: a key is unknown or not one of a topology, or a value is invalid.
    """
    try:
        return _Settings.model_validate(with_settings({}, settings)).cluster
    except ValidationError as error:
        raise ScenarioError(line(error.errors(include_url=False), _Settings)) from None


PEERS: Final = "other GPUs over PCIe"


def _facts(cluster: Cluster, found: tuple[Cut, ...]) -> Iterator[tuple[str, str]]:
    gpu = cluster.gpu
    yield "nodes", f"{cluster.nodes:,} of {cluster.gpus_per_node} GPUs: {cluster.ranks:,} in all"
    plain = [each for each in gpu.rates if each.dtype not in tuple(BlockFormat)]
    peak = max(plain, key=lambda each: each.peak)
    memory = f"{format_bytes(gpu.memory_bytes)} at {rate(gpu.memory_bytes_per_s)}"
    yield "GPU", f"{gpu.name}: {memory}, {format_rate(peak.peak)} in {peak.dtype}"
    yield from host_facts(cluster)
    if cluster.nodes_per_domain > 1:
        yield "NVSwitch domains", f"{cluster.domains:,} of {cluster.nodes_per_domain} nodes"
    yield "NICs", _who_is_served(cluster)
    yield "fabric", _fabric(cluster)
    for each in summed_up(link_classes(cluster)):
        what = f"{each.count:,} x {speed(each.link)}"
        target = PEERS if cluster.over_pcie and each.target == "NVSwitch" else each.target
        yield "links", f"{each.source} to {target}: {what} each way"
    if found:
        bisection, least = found[-1], narrowest(found)
        yield "bisection", _cut(bisection)
        yield "narrowest cut", f"{least.where}: {_cut(least)}"


def _cut(cut: Cut) -> str:
    each = rate(int(cut.bytes_per_s_per_gpu))
    return f"{rate(cut.bytes_per_s)} each way for {cut.gpus:,} GPUs, {each} for each"


def _who_is_served(cluster: Cluster) -> str:
    gpus, nics = cluster.gpus_per_node, cluster.nics_per_node
    if gpus == nics:
        return f"{nics} of a node, one for each GPU"
    if nics < gpus and gpus % nics == 0:
        return f"{nics} of a node, one for each {gpus // nics} GPUs"
    if nics % gpus == 0:
        return f"{nics} of a node, {nics // gpus} for each GPU"
    return f"{nics} of a node, each for the GPUs nearest to it"


def _fabric(cluster: Cluster) -> str:
    fabric = cluster.fabric
    summary = fabric.kind.summary.format(edges=len(fabric.edges)) or fabric.kind.name
    tiers = (
        f"{tier.nodes_below} nodes below a {tier.name}, {tier.oversubscription} : 1"
        for tier in fabric.tiers
    )
    return "; ".join([summary, *tiers])


def _link_object(each: LinkClass) -> dict[str, object]:
    return {
        "source": each.source,
        "target": each.target,
        "count": each.count,
        "bytes_per_s": each.link.bytes_per_s,
        "latency_s": each.link.latency_ps / 1e12,
    }


def _cut_object(cut: Cut) -> dict[str, object]:
    return {
        "where": cut.where,
        "gpus": cut.gpus,
        "bytes_per_s": cut.bytes_per_s,
        "bytes_per_s_per_gpu": float(cut.bytes_per_s_per_gpu),
    }
