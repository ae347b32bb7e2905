"""What a chat template reads, found in its syntax tree without rendering anything."""

import dataclasses
import functools

from megatrain.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateFacts:
    """Facts about one template."""

    marks_generation: bool
    """Whether it marks what the assistant says itself, with `{% generation %}`."""
    names: frozenset[str]
    """Variables, attributes and string keys that occur in it: what is not among them it cannot read."""


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
