"""What `polyad evaluate --knockout` found, for a person: from its JSON values."""

from typing import Any, TypeAlias

Row: TypeAlias = tuple[str, ...]
MOST_EXPERTS = 16
"""Rows of a layer, those that matter most; `--json` has all experts."""
MOST_CLASSES = 3
"""That are named of an expert."""
NAMED = ("characters", "frequency")
"""The ways to sort predicted tokens that are shown of steering."""


def knockout_table(result: dict[str, Any]) -> str:
    """A result for a person."""
    tokens = f"{result['tokens_scored']:,} tokens in {result['windows_read']:,} windows"
    lines = [
        f"checkpoint  {result['checkpoint']} (step {result['step']:,})",
        f"split       {result['split']} of {result['data']}: {tokens}",
        f"loss        {result['loss']:.4f} nats a token",
        f"processes   {result['processes']}",
        "",
        "change of the loss in nats a token without each expert, over all tokens and over those "
        "that it has a part in,",
        "and the classes of tokens that lose most, beyond noise; 95% intervals over windows, * "
        "leaves 0 out",
    ]
    for name, layer in result["layers"].items():
        lines += ["", *_layer(name, layer)]
    if result["steering"] is not None:
        lines += ["", *_steering(result["steering"])]
    return "\n".join(lines)


def _layer(name: str, layer: dict[str, Any]) -> list[str]:
    every = layer["by"]["all"]
    changes = [row[0] for row in every["change"]["value"]]
    order = sorted(range(len(changes)), key=lambda row: -abs(changes[row]))
    shown = sorted(order[:MOST_EXPERTS])
    title = (
        f"{name}: {layer['tokens_computed_again']:,} tokens computed again, "
        f"{100 * layer['share_of_all_pairs']:.1f}% of all pairs of a token and an expert"
    )
    if len(shown) < len(changes):
        title += f"; the {len(shown)} of {len(changes):,} experts that matter most"
    table: list[Row] = [("expert", "tokens", "all", "its own")]
    for row in shown:
        share = every["own_tokens"][row][0] / max(1, every["tokens"][0])
        loss = (_change(every["change"], row, 0), _change(every["own_change"], row, 0))
        table.append((layer["experts"][row], f"{100 * share:.1f}%", *loss))
    heads, *rows = _aligned(table, right=2)
    lines = [title, heads]
    for line, row in zip(rows, shown, strict=True):
        lines += [line, *_most(layer["harmed"][row])]
    return lines


def _most(harmed: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The classes that an expert is for, of predicted and of read tokens."""
    lines = []
    for side, classes in harmed.items():
        said = [
            f"{one['title']} {one['value']:+.3f} [{one['low']:+.3f}, {one['high']:+.3f}]"
            for one in classes[:MOST_CLASSES]
        ]
        lines.append(f"{'':16}{side + ':':10} {', '.join(said) or 'none beyond noise'}")
    return lines


def _steering(steering: dict[str, Any]) -> list[str]:
    by, lines = steering["by"], [f"--steer {each}" for each in steering["steer"]]
    changes: list[Row] = [("", "class", "tokens", "loss", "its change")]
    for kind in ("all", *(f"predicted {name}" for name in NAMED)):
        each = by[kind]
        for column, name in enumerate(each["classes"]):
            if each["tokens"][column]:
                tokens, loss = f"{each['tokens'][column]:,}", f"{each['loss'][column]:.4f}"
                changes.append((kind, name, tokens, loss, _change(each["change"], 0, column)))
    masses: list[Row] = [("", "class", "probability", "its change")]
    for kind, mass in steering["probability"].items():
        one = {name: [values] for name, values in mass["change"].items()}
        for column, name in enumerate(mass["classes"]):
            before = f"{mass['unsteered'][column]:.4f}"
            masses.append((f"next {kind}", name, before, _change(one, 0, column)))
    return [*lines, "", *_aligned(_once(changes)), "", *_aligned(_once(masses))]


def _once(table: list[Row]) -> list[Row]:
    """Names that repeat the first cell of the row above are left out."""
    above = ["", *(row[0] for row in table)]
    return [
        ("" if row[0] == before else row[0], *row[1:])
        for row, before in zip(table, above, strict=False)
    ]


def _change(table: dict[str, Any], row: int, column: int) -> str:
    """A change, its interval in brackets, and * if that leaves 0 out."""
    value, low, high = (table[name][row][column] for name in ("value", "low", "high"))
    if value is None:
        return "no token"
    if low is None or high is None:
        return f"{value:+.4f}"
    star = " *" if low > 0 or high < 0 else ""
    return f"{value:+.4f} [{low:+.4f}, {high:+.4f}]{star}"


def _aligned(table: list[Row], right: int = 0) -> list[str]:
    """Rows with columns of equal width; the first `right` ones end at the same place."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column < right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
