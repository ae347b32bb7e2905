"""Sentences about what of the rows is used, what is not, and what others would have done with it."""

from megatrain.data.rows import Remark

_UNUSED = ("column", "message key", "reasoning", "calls", "tools", "argument", "marked", "no template")
"""Kinds that mean that a part of a row is left out; `data.unused: error` refuses them."""

_WEIGHTS = ("weight", "weights", "loss_weight", "loss_weights", "sample_weight")
"""Columns that may be meant as weights of rows; most trainers do not read them, so they are not read unasked."""


def is_unused(remark: Remark) -> bool:
    """Whether it says that a part of a row is left out."""
    return remark[0] in _UNUSED


def describe(remark: Remark, count: int, rows: int, example: str) -> str:
    """A sentence about `count` of `rows` rows, of which one is at `example`."""
    kind, name = remark
    of = f"{count} of {rows} rows, for example {example}"
    if kind == "column":
        hint = f"; fields: {{weight: {name}}} multiplies the losses of each row by it" if name in _WEIGHTS else ""
        return f"the column {name!r} is not used ({of}){hint}"
    if kind == "message key":
        return f"the chat template does not read the key {name!r} of messages ({of})"
    if kind == "reasoning":
        return f"reasoning ({name}) that the chat template does not render is not learnt ({of})"
    if kind == "calls":
        return f"turns with tool calls that the chat template does not render are not learnt ({of})"
    if kind == "tools":
        return f"the chat template does not render tools ({of})"
    if kind == "argument":
        return f"the chat template does not read {name} ({of})"
    if kind == "no template":
        return f"the column {name!r} is not used, since a prompt is not put into a chat template ({of})"
    if kind == "marked":
        return f"turns of role {name!r} are marked to be learnt, and only the assistant's are ({of})"
    if kind == "role":
        return (
            f"the role {name!r} is not one of system, developer, user, assistant and tool, and goes to the chat "
            f"template as it is ({of}); map it in the source's fields, such as fields: {{role.assistant: {name}}}"
        )
    if kind == "empty" and name == "assistant":
        return f"assistant turns without any text teach the model to answer nothing ({of})"
    if kind == "empty":
        return f"messages of role {name!r} have no text ({of})"
    if kind == "no turn":
        return f"assistant turns that the chat template does not render are not learnt ({of})"
    if kind == "no end":
        return (
            f"the tokenizer has no end token (eos_token), so nothing ends a text and the model will not learn to stop "
            f"({of})"
        )
    if kind == "preference":
        return (
            f"the chosen answers are learnt as in fine-tuning; DPO and its like need a loss of their own "
            f"(Engine.step with loss_fn) ({of})"
        )
    return f"{kind} {name} ({of})"
