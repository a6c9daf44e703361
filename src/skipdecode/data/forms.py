"""What rows to generate from are made prompts with: the template that a checkpoint was tuned on, or what the user says.

The one place that decides it, for the command line, the server and Python alike.
"""

from __future__ import annotations

from typing import NamedTuple

from skipdecode.data.records import PromptField, Template
from skipdecode.data.tasks import load_task
from skipdecode.errors import SkipDecodeError, UsageError
from skipdecode.models.loading.recipe import Recipe

__all__ = ["PromptForm", "choose_form", "recipe_template"]


class PromptForm(NamedTuple):
    """How prompts are made.

    Parameters
    ----------
    field : PromptField
        Reads rows, texts and chats; its `template` goes to `PromptEncoder` too.
    remark : str or None
        One line for users: which template is used and how to do without, or why there is none.
    """

    field: PromptField
    remark: str | None

    @property
    def template(self) -> Template | None:
        """What prompts are put into; None: they stay as they are."""
        return self.field.template


def choose_form(
    recipe: Recipe | None,
    *,
    prompt_template: str | None = None,
    task: str | None = None,
    no_template: bool = False,
    chat: bool = False,
    field: str | None = None,
) -> PromptForm:
    """The form of a checkpoint's prompts: the user's, or the one that the checkpoint was tuned on, or none.

    Parameters
    ----------
    recipe : Recipe or None
        The checkpoint's (`LoadedModel.recipe`).
    prompt_template : str, optional
        Text with fields in braces.
    task : str, optional
        Name or file of a task, whose prompt is taken.
    no_template : bool
        Prompts stay as they are.
    chat : bool
        The user wants chats: a checkpoint's template that was not tuned as chat is left out.
    field : str, optional
        The field of a row that is the prompt, or goes into the template.

    Raises
    ------
    UsageError
        More than one of `prompt_template`, `task` and `no_template`; a template or task that is not accepted.
    """
    if sum((prompt_template is not None, task is not None, no_template)) > 1:
        raise UsageError("--prompt-template, --task and --no-template each say what a prompt is: give one of them")
    if prompt_template is not None:
        return PromptForm(PromptField(field, Template(prompt_template, chat=chat)), None)
    if task is not None:
        template = load_task(task).template()
        return PromptForm(PromptField(field, template), f"prompts go into the task's template {template.prompt!r}")
    if no_template:
        return PromptForm(PromptField(field), None)
    try:
        tuned = recipe_template(recipe)
    except SkipDecodeError as e:
        lost = f"the template that the checkpoint was tuned on is lost ({e}): name it with --prompt-template"
        return PromptForm(PromptField(field), lost)
    if tuned is None:
        return PromptForm(PromptField(field), None)
    through = " and the chat template" if tuned.chat else ""
    if chat and not tuned.chat:
        left = f"prompts go as chats, as asked; the checkpoint was tuned on the template {tuned.prompt!r} without chat"
        return PromptForm(PromptField(field), left)
    remark = (
        f"prompts go into the checkpoint's template {tuned.prompt!r}{through} (--no-template leaves them as they are)"
    )
    return PromptForm(PromptField(field, tuned), remark)


def recipe_template(recipe: Recipe | None) -> Template | None:
    """The template that a checkpoint was tuned on; None where its recipe says none.

    Raises SkipDecodeError where the recipe names a task alone that is not known here, or a template that is none.
    """
    if recipe is None or (recipe.prompt_template is None and recipe.task is None):
        return None
    if recipe.prompt_template is None:
        return load_task(recipe.task or "").template()
    return Template(
        recipe.prompt_template,
        recipe.responses,
        chat=recipe.chat,
        truncate=recipe.truncate,
        max_prompt_tokens=recipe.max_prompt_tokens,
    )
