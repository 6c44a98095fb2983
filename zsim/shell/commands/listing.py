"""`zsim list`."""

from zsim.shell.option import Code


def list_() -> Code:
    """Name what is installed."""
    import tomllib

    from zsim.api.scenario import load
    from zsim.backend import names
    from zsim.shell.answer import print_installed
    from zsim.shell.installed import part_names, scenarios, studies
    from zsim.topology import Part

    titles = [(name, load(name).title) for name in scenarios()]
    questions = [(name, tomllib.loads(text)["question"]) for name, text in studies().items()]
    parts = {
        "topologies": part_names(Part.SYSTEM),
        "nodes": part_names(Part.NODE),
        "fabrics": part_names(Part.FABRIC),
        "gpus": part_names(Part.GPU),
        "backends": names(),
    }
    print_installed({"scenarios": titles, "studies": questions}, parts)
    return Code.DONE
