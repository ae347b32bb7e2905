"""What a chat template reads, found in its syntax tree without rendering anything, and the date that it is given."""

import dataclasses
import datetime as dt
import functools
import json
from typing import TYPE_CHECKING, Any

from megatrain.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateFacts:
    """Facts about one template."""

    marks_generation: bool
    """Whether it marks what the assistant says itself, with `{% generation %}`."""
    names: frozenset[str]
    """Variables, attributes and string keys that occur in it: what is not among them it cannot read."""

    @property
    def reads_clock(self) -> bool:
        """Whether what it renders may depend on the day."""
        return "strftime_now" in self.names


@functools.lru_cache(maxsize=16)
def template_facts(template: str) -> TemplateFacts:
    """The facts about a template. Raises ConfigError for one that is no Jinja."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser

    class Generation(Extension):
        # The tag that transformers adds to Jinja: https://github.com/huggingface/transformers/pull/30650
        tags = {"generation"}  # noqa: RUF012 - Jinja reads it from the class
        found = False

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            Generation.found = True
            return nodes.Scope(body, lineno=line)

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], autoescape=False
    )
    try:
        tree = environment.parse(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template cannot be read: {error.message} in line {error.lineno}; correct it "
            "(model.chat_template)"
        ) from None
    names = {node.name for node in tree.find_all(nodes.Name)}
    names |= {node.attr for node in tree.find_all(nodes.Getattr)}
    names |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return TemplateFacts(Generation.found, frozenset(names))


_DIRECTIVES = "aAbBcdjmpxyYHIMSUWwDeFhT"
"""Of `strftime`."""
_UNPADDED = "dmjHIMSUW"
"""Those that also occur as `%-d`."""


def with_date(template: str, date: dt.date) -> str:
    """The template with a `strftime_now` of its own that formats midnight of `date` instead of the present.

    transformers gives templates the present and no way to change it, so that what a row is rendered as depends on the
    day: a run that goes on the day after would train on other tokens. A macro of a template hides the function of
    that name, and leaves everything else to transformers.
    """
    if not template_facts(template).reads_clock:
        return template
    moment = dt.datetime.combine(date, dt.time())
    spellings = [f"%{letter}" for letter in _DIRECTIVES] + [f"%-{letter}" for letter in _UNPADDED]
    values = {spelling: moment.strftime(spelling) for spelling in spellings}
    # "%%" is a percent sign, and no part of a directive.
    pairs = [("%%", "\0"), *values.items(), ("\0", "%")]

    def formatted(text: str) -> str:
        for directive, value in pairs:
            text = text.replace(directive, value)
        return text

    # Formats are nearly always written out in the template. To go through all directives takes longer than all the rest
    # of a rendering.
    names = sorted(name for name in template_facts(template).names if "%" in name and name.isascii())
    macro = (
        f"{{%- macro strftime_now(format) -%}}{{%- set written = {json.dumps({n: formatted(n) for n in names})} -%}}"
        "{%- if format in written -%}{{- written[format] -}}{%- else -%}"
        "{%- set made = namespace(text=format) -%}"
        f"{{%- for directive, value in {json.dumps(pairs)} -%}}"
        "{%- set made.text = made.text.replace(directive, value) -%}{%- endfor -%}{{- made.text -}}"
        # The line break is not rendered: it is the first after a block.
        "{%- endif -%}{%- endmacro %}\n"
    )
    return macro + template


@dataclasses.dataclass(frozen=True, slots=True)
class Template:
    """One of a tokenizer's chat templates."""

    text: str
    """With the date put in."""
    facts: TemplateFacts
    """Of the template as it is."""


def templates_of(tokenizer: "PreTrainedTokenizerBase", date: dt.date) -> dict[str, Template]:
    """The tokenizer's templates by name; one without a name is called `default`. Raises ConfigError where there are
    several and none is the default."""
    own: Any = tokenizer.chat_template or {}
    texts: dict[str, str] = {"default": own} if isinstance(own, str) else own
    if texts and "default" not in texts:
        raise ConfigError(
            f"the tokenizer has the chat templates {', '.join(sorted(texts))} and none called default; name one as "
            "model.chat_template"
        )
    return {name: Template(with_date(text, date), template_facts(text)) for name, text in texts.items()}
