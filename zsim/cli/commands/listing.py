"""`zsim list`."""

from zsim.cli.option import Code


def list_() -> Code:
    """Name what is installed."""
    import tomllib

    from zsim.api.scenario import load
    from zsim.backend.backend import names
    from zsim.cli.answer import print_installed
    from zsim.cluster.files import Part
    from zsim.files.installed import part_names, scenarios, studies

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
