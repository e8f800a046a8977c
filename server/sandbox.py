"""The Jinja environment that chat templates run in, as transformers sets it up, with a bound on work.

Owns what a template may use and how long it may take: a template comes with a checkpoint, so it is not trusted, and
the values it walks come from clients. Knows no chat and no tokens.
"""

from __future__ import annotations

import json
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from jinja2.parser import Parser
    from jinja2.runtime import Context

# The published templates look at every message from every message; this is about a thousand of them, some seconds.
MAX_STEPS: Final = 1_000_000
# Turns of loops and calls of macros are cheaper; without a bound, loops in loops over nothing never end.
MAX_TURNS: Final = 3_000_000
_steps: Final = ContextVar[list[int]]("steps")
_turns: Final = ContextVar[list[int]]("turns")

_TOO_LONG: Final = "the conversation is too long for the model's chat template"
_COUNTED: Final = "_counted"

# What a template may raise on values that its author did not expect; macros that call themselves may recurse too far.
TEMPLATE_FAULTS: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


class RefusalError(jinja2.TemplateError):
    """A sentence for the client: the template's own, from `raise_exception`, or that the work is too much."""


class TooMuchWorkError(RefusalError):
    """The template ran into one of the bounds."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment; it counts the values that a template looks up, the turns of its loops and its calls."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _GenerationExtension],
        )
        self.filters["tojson"] = _to_json
        self.filters[_COUNTED] = _counted
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def compile(self, source: str | nodes.Template, *args: Any, **more: Any) -> Any:
        """Compile a template with its loops counted."""
        tree = self.parse(source) if isinstance(source, str) else source
        for loop in tree.find_all(nodes.For):
            values = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
            loop.iter = values.set_environment(self)
        return super().compile(tree, *args, **more)

    def call(self, context: Context, obj: Any, *args: Any, **more: Any) -> Any:
        """Call a function or a macro for a template."""
        _count_turn()
        return super().call(context, obj, *args, **more)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up `obj.attribute` for a template."""
        _count_step()
        if type(obj) is Namespace and not attribute.startswith("_"):
            # What the template itself put there is safe, and the sandbox's checks take ten times as long.
            try:
                return getattr(obj, attribute)
            except AttributeError:
                pass
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up `obj[argument]` for a template."""
        _count_step()
        return super().getitem(obj, argument)


def run_template(template: jinja2.Template, scope: Mapping[str, Any]) -> str:
    """Render a template of a `Sandbox`.

    Raises:
        RefusalError: the template refuses the values.
        TooMuchWorkError: it looks up more than `MAX_STEPS` of them, or takes more than `MAX_TURNS`.
        Exception: one of `TEMPLATE_FAULTS` for values the template cannot print.
    """
    _steps.set([0])
    _turns.set([0])
    return template.render(scope)


class _GenerationExtension(Extension):
    """Lets `{% generation %}` pass, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it for the instance

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _count_step() -> None:
    steps = _steps.get()
    steps[0] += 1
    if steps[0] > MAX_STEPS:
        raise TooMuchWorkError(_TOO_LONG)


def _count_turn() -> None:
    turns = _turns.get()
    turns[0] += 1
    if turns[0] > MAX_TURNS:
        raise TooMuchWorkError(_TOO_LONG)


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _count_turn()
        yield value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise RefusalError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
