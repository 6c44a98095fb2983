"""Arguments of a command line in shell syntax."""

import shlex

from zsim.runtimes.trainer_files.tables import TrainerFileError


def words_by_name(
    text: str, *, field: str, any_value: tuple[str, ...] = ()
) -> dict[str, list[str]]:
    """Return the values of each argument of a command line by its name.

    If an argument is given twice, the last one counts. `field` is the scenario key of the command
    line, for messages. Arguments that start with one of `any_value` may have a variable as value.

    Raises:
        TrainerFileError: the text is not a command line, or has other variables.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise TrainerFileError(f"{field}: no command line: {str(error).lower()}") from None
    scripts = [at for at, word in enumerate(words) if word.endswith(".py")]
    found: dict[str, list[str]] = {}
    values: list[str] | None = None
    is_free, last = False, ""
    for word in words[scripts[0] + 1 :] if scripts else words:
        begins = word.removeprefix("--").partition("=")[0].replace("_", "-")
        if word.startswith("--"):
            is_free = begins.startswith(any_value) and "$" not in begins
        elif values and "$" in values[-1]:
            is_free = False  # a variable after another one may hold further arguments
        if "$" in word and not is_free:
            name = f"--{begins}: " if word.startswith("--") and begins != word[2:] else last
            raise TrainerFileError(
                f"{field}: {name}{word!r}: must be written out, a variable has no value"
            )
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            values = found[name.replace("_", "-")] = [value] if equals else []
            last = f"--{name}: "
        elif values is None:
            raise TrainerFileError(
                f"{field}: {word!r}: must be an argument, such as --num-layers 32"
            )
        else:
            values.append(word)
    return found
