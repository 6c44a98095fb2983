"""The page of `zsim serve` as HTML."""

from importlib.metadata import version

from zsim.files.html_page import html_template
from zsim_plan.page.setting_page import FormAnswer, SettingPage

PACKAGE = "zsim_plan.page"
FORM, ANSWER = "form_page.html.jinja", "form_answer.html.jinja"


def render_form(page: SettingPage) -> str:
    """Return the page on which a setting is chosen, with the answer for the first setting."""
    answer = render_answer(page.answer)
    return html_template(FORM, PACKAGE).render(page=page, answer=answer, version=version("zsim"))


def render_answer(found: FormAnswer) -> str:
    """Return the part of that page that changes with the setting."""
    return html_template(ANSWER, PACKAGE).render(answer=found).strip()
