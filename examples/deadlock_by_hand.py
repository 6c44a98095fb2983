"""Four ranks pass a buffer on in a ring: sent first and received second, everybody waits."""

from zsim.proof import check
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.schedule import Schedule


def pass_on(*, together: bool) -> Schedule:
    """Each rank sends `mine` to the next rank and receives `theirs` from the one before."""
    build = ScheduleBuilder.of("pass it on", data=4)
    ring = build.group("ring", "data")
    mine, theirs = build.buffer("mine", 8), build.buffer("theirs", 8, home="communication")
    step = build.step
    step.allocate(mine, theirs)
    filled = step.fill("fill", mine.all, 1.0)
    step.send("send", ring, mine.all, offset=1, after=[] if together else [filled])
    step.receive("receive", ring, theirs.all, offset=-1)
    if together:  # issued as one: neither waits for the other
        step.together("exchange", 2, after=[filled])
    step.free(mine, uses=["step/exchange" if together else "step/send"])
    step.free(theirs)
    return build.schedule()


if __name__ == "__main__":
    for together in (False, True):
        findings = check(pass_on(together=together))
        print(f"together={together}: {'proved' if not findings else 'refuted'}")
        for finding in findings:
            print(f"  {finding.invariant}: {finding.where}: {finding.why}")
            for line in finding.witness:
                print(f"    {line}")
