"""Pictures of networks, by layers."""

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.graph.traversal import toposort

from pytensor_ml.base import BlockOp, LayerOp
from pytensor_ml.params import NonTrainableParameter, TrainableParameter
from pytensor_ml.pytensorf.collect import Outputs, as_output_list
from pytensor_ml.summary import (
    FEWEST_FOLDED,
    Parameter,
    Part,
    folded,
    parameter_part,
    printable,
    whole,
)

__all__ = ["Picture", "plot_network"]


class Picture:
    """A picture as SVG text, which notebooks show.

    Parameters
    ----------
    svg : str
        The text.
    """

    def __init__(self, svg: str):
        self.svg = svg

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> None:
        """Write the picture to a file, which browsers and vector graphics programs open."""
        Path(path).write_text(self.svg, encoding="utf-8")


def plot_network(outputs: Outputs) -> Picture:
    """Draw the layers of a network and what each reads, from the inputs down.

    Steps of the graph that are neither a layer's op nor have a name are passed over, parameters are
    left out, and equal blocks that follow one another are one box.

    Parameters
    ----------
    outputs : Variable or sequence of Variable
        The network's outputs.

    Returns
    -------
    Picture

    Examples
    --------
    >>> from pytensor_ml.activations import SiLU
    >>> from pytensor_ml.layers import Input, Linear, Sequential
    >>> from pytensor_ml.plot import plot_network
    >>> layers = [Linear("fc", n_in=64, n_out=32), SiLU(), Linear("out", n_in=32, n_out=10)]
    >>> picture = plot_network(Sequential(*layers)(Input("x", shape=(None, 64))))
    >>> [text in picture.svg for text in ("fc: Linear", "SiLU", "(None, 10)")]
    [True, True, True]
    """
    boxes = _boxes(network_nodes(outputs))
    texts = [_texts(box) for box in boxes]
    half = max((8 * max(map(len, text)) // 2 + 12 for text in texts), default=0)
    middle, height, gap = half + 12, 44, 28
    tops = [12 + i * (height + gap) for i in range(len(boxes))]
    place = {id(node): i for i, box in enumerate(boxes) for node in box}
    edges = sorted(
        {
            (place[id(read)], i)
            for i, box in enumerate(boxes)
            for node in box
            for read in node.reads
        },
        key=lambda edge: (edge[1] - edge[0], edge),
    )
    drawn = []
    # What passes boxes by has a lane at their side, the shortest the innermost.
    lanes: list[list[tuple[int, int]]] = []
    for start, stop in edges:
        if start == stop:
            continue
        if stop == start + 1:
            path = f"M{middle} {tops[start] + height}V{tops[stop]}"
        else:
            crossed = [any(a < stop and start < b for a, b in lane) for lane in lanes]
            lane = crossed.index(False) if False in crossed else len(lanes)
            lanes += [[]] * (lane == len(lanes))
            lanes[lane] = [*lanes[lane], (start, stop)]
            right, x = middle + half, middle + half + 18 + 14 * lane
            path = f"M{right} {tops[start] + 30}H{x}V{tops[stop] + 14}H{right}"
        drawn.append(f'<path d="{path}" marker-end="url(#head)"/>')
    for box, top, (title, detail) in zip(boxes, tops, texts, strict=True):
        is_input = box[0].variable.owner is None
        fill, corner = ("#f3efe4", height // 2) if is_input else ("#e4ecf3", 4)
        drawn.append(
            f'<rect x="{middle - half}" y="{top}" width="{2 * half}" height="{height}" '
            f'rx="{corner}" fill="{fill}"/>'
            f'<text x="{middle}" y="{top + 18}" font-size="13" {_INK}>{escape(title)}</text>'
            f'<text x="{middle}" y="{top + 35}" font-size="11" {_INK}>{escape(detail)}</text>'
        )
    width = middle + half + 24 + 14 * len(lanes)
    total = max(0, 24 + len(boxes) * (height + gap) - gap)
    return Picture(_SVG.format(width=width, height=total, drawn="\n".join(drawn)))


# No style sheet: in a notebook's page it would reach other pictures.
_INK = 'fill="#111" stroke="none"'
_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" \
viewBox="0 0 {width} {height}">
<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" \
orient="auto"><path d="M0 0L8 4L0 8z" fill="#444" stroke="none"/></marker></defs>
<rect width="100%" height="100%" fill="white"/>
<g fill="none" stroke="#444" font-family="monospace" text-anchor="middle">
{drawn}
</g>
</svg>
"""


@dataclass(eq=False)
class Node:
    """An input, or a step of a network that is a layer or has a name.

    Parameters
    ----------
    variable : Variable
        The input, or the step's first output.
    kind : str
        The layer's name for its op; empty if it is none.
    reads : list of Node
        Where its data comes from.
    parameters : list of TrainableParameter or NonTrainableParameter
        What it reads besides.
    """

    variable: Variable
    kind: str = ""
    reads: list["Node"] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)

    @property
    def name(self) -> str:
        return (self.variable.name or "").removesuffix("_output")

    @property
    def op(self) -> Op | None:
        """The op of a layer."""
        return self.variable.owner.op if self.kind else None


def network_nodes(outputs: Outputs) -> list[Node]:
    """Return the steps of a network, each after those it reads.

    Parameters
    ----------
    outputs : Variable or sequence of Variable
        Its outputs.
    """
    outputs = as_output_list(outputs)
    nodes: list[Node] = []
    # What each variable comes from, steps without a layer or a name being passed over.
    origins: dict[Variable, dict[Node | Parameter, None]] = {}

    def origin_of(variable: Variable) -> dict[Node | Parameter, None]:
        if variable not in origins:
            origins[variable] = {}
            if isinstance(variable, TrainableParameter | NonTrainableParameter):
                origins[variable] = {variable: None}
            elif not isinstance(variable, Constant | SharedVariable):
                nodes.append(Node(variable))
                origins[variable] = {nodes[-1]: None}
        return origins[variable]

    for apply in toposort(outputs):
        # What a block takes was found from its output back.
        inputs = apply.inputs[::-1] if isinstance(apply.op, BlockOp) else apply.inputs
        read = {origin: None for x in inputs for origin in origin_of(x)}
        reads = [origin for origin in read if isinstance(origin, Node)]
        named = [v for v in apply.outputs if v.name]
        # PyTensor names transposes; those of parameters are no steps.
        is_step = isinstance(apply.op, LayerOp | BlockOp) or (named and reads)
        if is_step or set(apply.outputs) & set(outputs):
            parameters = [origin for origin in read if not isinstance(origin, Node)]
            nodes.append(Node((named or apply.outputs)[0], _kind(apply), reads, parameters))
            read = {nodes[-1]: None}
        origins |= dict.fromkeys(apply.outputs, read)
    for output in outputs:
        origin_of(output)
    return nodes


def network_part(outputs: Outputs, title: str) -> Part:
    """Return a network with the parameters of its steps, for a table of them."""
    seen: set[int] = set()
    return whole(
        [
            whole(
                [parameter_part(parameter, "", seen) for parameter in node.parameters],
                label=node.name,
                kind=node.kind,
            )
            for node in network_nodes(outputs)
        ],
        title=title,
    )


def _kind(apply: Apply) -> str:
    op = apply.op
    if isinstance(op, BlockOp):
        return op.name or "Block"
    return type(op).__name__.removesuffix("Layer") if isinstance(op, LayerOp) else ""


def _boxes(nodes: list[Node]) -> list[list[Node]]:
    """Gather equal steps that follow one another."""
    place = {id(node): i for i, node in enumerate(nodes)}
    runs: list[list[Node]] = []
    run_of: dict[int, list[Node]] = {}
    for node in nodes:
        for run in [run_of[id(read)] for read in node.reads]:
            others = [read for read in node.reads if run_of[id(read)] is not run]
            stays_below = all(place[id(read)] < place[id(run[0])] for read in others)
            if (
                node.op is not None
                and run[-1] in node.reads
                and run[-1].op == node.op
                and stays_below
            ):
                run.append(node)
                run_of[id(node)] = run
                break
        else:
            run_of[id(node)] = [node]
            runs.append(run_of[id(node)])
    return [
        box
        for run in runs
        for box in ([run] if len(run) >= FEWEST_FOLDED else [[node] for node in run])
    ]


def _texts(box: list[Node]) -> tuple[str, str]:
    last = box[-1]
    if len(box) > 1:
        title = folded([node.name for node in box], last.kind)
    else:
        title = ": ".join(dict.fromkeys(filter(None, (last.name, last.kind))))
    shape = getattr(last.variable.type, "shape", None)
    detail = str(last.variable.type) if shape is None else f"{shape} {last.variable.type.dtype}"
    return printable(title), printable(detail)
