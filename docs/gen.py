"""What the site takes from the code itself: settings, help texts, doc comments; and equations as
MathML, so that pages need nothing from elsewhere."""

from __future__ import annotations

import html
import inspect
import re
import typing
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import click
import griffe
import typer
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import TypeAdapter

from everfed import cli, listing
from everfed import config as configs
from everfed.boundaries import Boundaries
from everfed.engines.terms import Terms
from everfed.late import Late
from everfed.local import Local
from everfed.methods import METHODS

HERE = Path(__file__).parent
COLUMNS = ["key", "meaning", "type", "default"]
LEGEND = r"""
- **Client state**: whether a client must remember something from round to round.
- **Exchanges**: how often a client and the server talk in a round.
- **Boundaries**: whether the method must be told where a task ends.
- **Traffic**: what a client receives + what it sends in a round, in models (P), measured on a tiny
  run; *a task*: once in every task.
- **Secure aggregation**: whether sums over clients are enough, so that the server need not see what
  one client sent.

Methods add up: `everfed.methods.special(0.1) + everfed.methods.fedprox(0.01)`.
`everfed list methods` prints the table with every setting.

## Notation

| symbol | meaning |
|---|---|
| $w$ | the server's model, all its parameters as one vector |
| $y$ | a client's model while it trains, beginning at $w$ |
| $w_i$ | the model of client $i$ after its training |
| $u_i = w_i - w$ | its update (many papers write the opposite sign) |
| $p_i$ | its weight in the mean, by samples or the same for all; $\sum_i p_i = 1$ |
| $u = \sum_i p_i u_i$ | the mean update |
| $f_i$ | the loss on the data of client $i$ |
| $\eta$, $\eta_g$ | learning rates of clients (`local.lr`) and of the server (`server_lr`) |
| $S$, $N$ | clients in a round, and in all |

Products, squares and roots of vectors are coordinate by coordinate.
"""
#: limits in a JSON schema
SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


# mkdocs calls these --------------------------------------------------------------------------
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """A page in methods/ is in the navigation."""
    pages = sorted(path.stem for path in (HERE / "methods").glob("*.md") if path.stem != "index")
    for entry in config.nav or []:
        if "Methods" in entry:
            entry["Methods"] += [f"methods/{name}.md" for name in pages]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Pages that are nothing but what the code says."""
    made = {
        "reference/configuration.md": configuration(),
        "reference/command_line.md": command_line(),
        "methods/index.md": overview(),
        "reference/methods.md": builders(),
    }
    for path in sorted((HERE.parent / "examples").glob("*.py")):
        code = f'# {path.name}\n\n```python\n--8<-- "examples/{path.name}"\n```\n'
        made[f"examples/{path.stem}.md"] = code
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    folder, _, name = page.file.src_uri.removesuffix(".md").rpartition("/")
    if folder == "methods" and name != "index":
        markdown = method_page(name, markdown)
    # in the repository the examples lie beside docs/
    return re.sub(r"\]\(\.\./examples/(\w+)\.py\)", r"](examples/\1.md)", markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Equations as MathML."""

    def show(found: re.Match[str]) -> str:
        tag, latex = found[1], html.unescape(found[2]).strip()
        made = convert(latex, display="block" if tag == "div" else "inline")
        if "\\" in made or "&amp;" in made:  # what it does not know, it lets through
            raise PluginError(f"{page.file.src_uri}: an equation is not understood: {latex}")
        norm = "&#x02016;"  # it grows with what stands beside it unless told not to
        made = made.replace(f"<mo>{norm}", f'<mo stretchy="false">{norm}')
        return f'<{tag} class="math">{made}</{tag}>'

    pattern = r'<(div|span) class="arithmatex">\\[\[(](.*?)\\[\])]</\1>'
    return re.sub(pattern, show, content, flags=re.DOTALL)


# pages ---------------------------------------------------------------------------------------
def method_page(name: str, text: str) -> str:
    """A method's page with what its code says of it: facts under the title, settings at the end."""
    if name not in METHODS:
        raise PluginError(f"docs/methods/{name}.md: everfed has no method of that name")
    entry = METHODS[name]
    title, _, rest = text.lstrip().partition("\n")
    facts = [
        f"**Name** `{name}`",
        *(f"**{key}** {value}" for key, value in facts_of(name).items()),
    ]
    source = Path(inspect.getsourcefile(inspect.unwrap(entry.build)) or "").name
    facts.append("[What these mean, and notation](index.md#notation)")
    top = f"{title}\n\n{entry.what}\n\n" + "<br>\n".join(facts) + "\n{ .facts }\n"
    end = [
        "## Settings",
        _settings_table(entry.build) or "None.",
        f"In Python `everfed.methods.{name}(...)`, in a configuration `[methods.{name}]`, on the "
        f"command line `--set methods.{name}.KEY=VALUE`. The code: "
        f"`src/everfed/methods/{source}`.",
    ]
    return "\n\n".join([top, rest.strip(), *end])


@cache
def facts_of(name: str) -> dict[str, str]:
    """What a method asks of a federation; the traffic is measured on a tiny run."""
    method = METHODS[name].build()
    needs = method.needs

    def yes(flag: bool) -> str:
        return "yes" if flag else "no"

    return {
        "Client state": yes(needs.client_state),
        "Exchanges": str(needs.exchanges),
        "Boundaries": yes(needs.boundaries),
        "Traffic": listing.traffic(method).replace(" P", "\u00a0P"),
        "Secure aggregation": yes(needs.secure_aggregation),
    }


def overview() -> str:
    """All methods in one table."""
    lines = [
        "---\nhide: [toc]\n---",
        "# Methods",
        "What each asks of a federation. Which to take: [Choosing a method](../choosing.md).",
    ]
    rows = []
    for name, entry in sorted(METHODS.items()):
        page = HERE / "methods" / f"{name}.md"
        link = f"[`{name}`]({name}.md)" if page.exists() else f"`{name}`"
        rows.append([link, entry.what, *facts_of(name).values()])
    head = ["", "what it does", *(key.lower() for key in facts_of("fedavg"))]
    lines.append(_table(head, rows))
    lines.append(LEGEND)
    return "\n\n".join(lines)


def builders() -> str:
    """The functions that build the methods."""
    lines = ["# Methods", "What they do is on [their pages](../methods/index.md)."]
    lines += [f"::: {METHODS[name].build.__module__}.{name}" for name in sorted(METHODS)]
    return "\n\n".join(lines)


def configuration() -> str:
    """Every key that a configuration may hold."""
    sections = ("local", "late", "boundaries", "compare", "flower")
    named = ("data", "stream", "present", "model", "method", "methods")
    top = [name for name in configs.Config.model_fields if name not in (*sections, *named)]
    lines = [
        "# Configuration",
        "A configuration is a TOML file; `everfed config` prints one to start from. What a file "
        "does not say has its default, and `--set KEY=VALUE` changes a key on the command line, "
        "for example `--set local.lr=0.1`. Unknown keys and impossible values are errors, told "
        "before any work starts.",
        "## Whole run",
        _model_table(configs.Config, "", top),
        "## [local]",
        "How a client trains on its own data.",
        _model_table(Local, "local."),
        "## [late]",
        "[Replies that come late, or never](../streams.md#replies-that-come-late-or-never).",
        _model_table(Late, "late."),
        "## [boundaries]",
        "[Tasks that nobody announces](../streams.md#tasks-that-nobody-announces).",
        _model_table(Boundaries, "boundaries."),
    ]
    builders = {
        "data": ("The data set.", configs.DATASETS),
        "stream": ("Who holds which data when.", configs.STREAMS),
        "model": ("The model.", configs.MODELS),
    }
    for section, (what, choices) in builders.items():
        default = configs.Config.model_fields[section].default["name"]
        lines += [f"## [{section}]", f"{what} `name` chooses one (default `{default}`):"]
        for name, build in choices.items():
            lines += [f'### name = "{name}" {{ #{section}-{name} }}', _about(build)]
            lines.append(_settings_table(build, f"{section}.") or "No further keys.")
        if section == "stream":
            (build,) = configs.PRESENT.values()
            lines += ["## [present]", _about(build), _settings_table(build, "present.")]
    lines += [
        "## [method]",
        "The method of `everfed run`: its `name`, and any of that "
        "[method's settings](../methods/index.md). Three keys go with every method:",
        "- `method.plus`: a list of tables, methods whose parts are added, each with a `name` and "
        "settings\n- `method.local`: a table, keys of `[local]` for this method alone\n"
        "- `method.stream`: a table, keys of `[stream]` for this method alone, to compare streams",
        "## [methods.NAME]",
        "Settings of a method wherever it is named without any: in `[method]`, with `-m`, in a "
        "comparison. The same keys as in `[method]`.",
        "## [compare]",
        "What `everfed compare` runs.",
        _model_table(configs.Compare, "compare."),
        "## [flower]",
        "The terms of a [federation of real sites](../deployment.md).",
        _model_table(Terms, "flower."),
    ]
    return "\n\n".join(lines)


def command_line() -> str:
    """The help of every command."""
    lines = ["# Command line", "What `everfed COMMAND --help` says."]

    def walk(command: click.Command, parent: click.Context | None, name: str) -> None:
        context = click.Context(command, info_name=name, parent=parent, terminal_width=88)
        lines.append(f"## {context.command_path}")
        lines.append(f"```text\n{command.get_help(context)}\n```")
        for inner, sub in getattr(command, "commands", {}).items():
            walk(sub, context, inner)

    walk(typer.main.get_command(cli.app), None, "everfed")
    return "\n\n".join(lines)


# settings ------------------------------------------------------------------------------------
def _settings_table(build: Callable[..., Any], prefix: str = "") -> str:
    """What a configuration may set of a builder: from its signature and its docstring's Args."""
    hints = typing.get_type_hints(build, include_extras=True)
    meaning = arguments(build)
    rows = [
        [f"`{prefix}{name}`", meaning.get(name, ""), kind(hints[name]), _default(p.default)]
        for name, p in configs.settings(build).items()
    ]
    return _table(COLUMNS, rows) if rows else ""


def _model_table(model: type, prefix: str, only: list[str] | None = None) -> str:
    """The fields of a pydantic model or dataclass: types and defaults, and the doc comments."""
    own = _code()[f"{model.__module__.removeprefix('everfed.')}.{model.__name__}"]
    rows = []
    for name, schema in TypeAdapter(model).json_schema()["properties"].items():
        if only is None or name in only:
            text = own.members[name].docstring
            if text is None:
                raise PluginError(f"{own.path}.{name}: say what it means, in a #: comment")
            cells = [text.value, _words(schema), _default(schema.get("default"))]
            rows.append([f"`{prefix}{name}`", *cells])
    return _table(COLUMNS, rows)


def kind(annotation: Any) -> str:
    """A type in words, from its JSON schema."""
    return _words(TypeAdapter(annotation).json_schema())


def _words(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        options = [_words(option) for option in schema["anyOf"] if option.get("type") != "null"]
        return " or ".join(options)
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{value!r}`".replace("'", '"') for value in values)
    match schema.get("type"):
        case "array" if "prefixItems" in schema:
            return f"list of {len(schema['prefixItems'])}: {_words(schema['prefixItems'][0])}"
        case "array":
            return f"list of {_words(schema.get('items', {}))}"
        case "object":
            return "table"
        case "integer" | "number" as number:
            limits = [f"{sign} {schema[key]:g}" for key, sign in SIGNS.items() if key in schema]
            word = "whole number" if number == "integer" else "number"
            return " ".join([word, ", ".join(limits)]).strip()
        case "boolean":
            return "true or false"
        case "string":
            return "text"
    return "anything"


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        value = list(value)
    return f"`{value!r}`".replace("'", '"')


def _about(build: Callable[..., Any]) -> str:
    """A docstring's text, without examples and arguments."""
    text = inspect.getdoc(build) or ""
    return re.split(r"\n\s*(?:>>>|Args:)", text)[0].strip()


def arguments(build: Callable[..., Any]) -> dict[str, str]:
    """A docstring's Args."""
    text = griffe.Docstring(inspect.getdoc(build) or "").parse("google", warnings=False)
    sections = [s for s in text if s.kind is griffe.DocstringSectionKind.parameters]
    return {item.name: " ".join(item.description.split()) for s in sections for item in s.value}


def _table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])


# doc comments --------------------------------------------------------------------------------
class DocComments(griffe.Extension):
    """`#:` comments of attributes, on their line or above it, are their docstrings; and examples in
    docstrings are code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            fence = r"```pycon\n\1\n```\n"
            obj.docstring.value = re.sub(r"(?m)^(>>> .*(?:\n.+)*)", fence, obj.docstring.value)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and isinstance(attr.filepath, Path) and attr.lineno:
            found = _comment(attr.filepath, attr.lineno - 1, (attr.endlineno or attr.lineno) - 1)
            if found:
                attr.docstring = griffe.Docstring(found, parent=attr)


def _comment(path: Path, first: int, last: int) -> str:
    """The comment of what stands on these lines (counted from 0)."""
    lines = _lines(path)
    _, _, same = lines[last].partition("#:")
    if same:
        return same.strip()
    above: list[str] = []
    while first > 0 and lines[first - 1].strip().startswith("#:"):
        first -= 1
        above.insert(0, lines[first].strip()[2:].strip())
    return " ".join(above)


@cache
def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


@cache
def _code() -> griffe.Module:
    loaded = griffe.load(
        "everfed",
        search_paths=[HERE.parent / "src"],
        extensions=griffe.load_extensions(DocComments),
        submodules=True,
    )
    assert isinstance(loaded, griffe.Module)
    return loaded
