"""The page of `zsim serve` as HTML."""

from importlib.metadata import version

from zsim.files.html_page import html_template
from zsim_plan.page.setting_page import FormAnswer, SettingPage, SideBySide

PACKAGE = "zsim_plan.page"
FORM, ANSWER = "form_page.html.jinja", "form_answer.html.jinja"
PAIR = "side_by_side.html.jinja"


def render_form(page: SettingPage) -> str:
    """Return the page on which a setting is chosen, with the answer for the first setting."""
    answer = render_answer(page.answer)
    return html_template(FORM, PACKAGE).render(page=page, answer=answer, version=version("zsim"))


def render_answer(found: FormAnswer | SideBySide) -> str:
    """Return the part of that page that changes with the setting."""
    if isinstance(found, SideBySide):
        answers = [(name, choices, render_answer(each)) for name, choices, each in found.answers]
        return html_template(PAIR, PACKAGE).render(found=found, answers=answers).strip()
    return html_template(ANSWER, PACKAGE).render(answer=found).strip()
