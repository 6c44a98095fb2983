"""Draw a figure of a run's page as a separate SVG file."""

from zsim.analysis.summary import Summary, last_step
from zsim.backend.backend import Job
from zsim.report.drawing import picture
from zsim.report.memory_section import memory
from zsim.report.network_section import link_shares
from zsim.report.svg.cluster_drawing import draw
from zsim.report.svg.figure import MEMORY, NETWORK, NoFigureError
from zsim.report.time_section import split
from zsim.trace.trace import Trace


def run_picture(figure: str, job: Job, trace: Trace, found: Summary, *, title: str) -> str:
    """Return the SVG of `figure`, one of `RUN_FIGURES`, for `trace`, a run of `job`.

    Raises:
        NoFigureError: the backend does not measure the data of this figure.
    """
    begin_ps, end_ps = last_step(trace)
    if figure != MEMORY and begin_ps == end_ps:
        raise NoFigureError(f"backend {trace.backend} has no clock: there is no time to draw")
    if figure == NETWORK:
        if not trace.links:
            raise NoFigureError(f"backend {trace.backend} does not tell what crosses a link")
        return draw(job.cluster, None, link_shares(trace, found.step_time_s), title=title)
    section = memory(job, trace) if figure == MEMORY else split(job, trace)
    return picture(section.figure, title, " ".join(section.sentences))
