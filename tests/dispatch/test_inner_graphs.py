import pytensor
import pytensor.tensor as pt
import pytest

from pytensor_ml.layers import rotary_table, scaled_dot_product_attention
from pytensor_ml.layers.attention import AttentionLayer, AttentionPullback
from pytensor_ml.layers.positional import RotaryTable


def test_inner_graphs_are_optimized_where_they_run_and_left_alone_where_a_kernel_runs(backend):
    if backend == "c":
        pytest.skip("C kernels take the place of ops before inner graphs are optimized")
    q = pt.tensor("q", shape=(None, 2, None, 4), dtype="float32")
    positions = pt.lmatrix("positions")
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 8}
    table = rotary_table(positions, rotary_dim=4, scaling=dynamic)
    attended = scaled_dot_product_attention(q, q, q, is_causal=True)
    outputs = [table, attended, pt.grad(attended.sum(), q)]
    # On Numba nothing is compiled before the first call.
    run = pytensor.function([q, positions], outputs)

    def ops(nodes):
        kinds = (AttentionLayer, AttentionPullback, RotaryTable)
        return {type(node.op): node.op for node in nodes if isinstance(node.op, kinds)}

    built = ops(pytensor.graph.traversal.applys_between([], outputs))
    compiled = ops(run.maker.fgraph.apply_nodes)
    assert len(built) == len(compiled) == 3
    for kind, op in built.items():
        assert (compiled[kind].fgraph == op.fgraph) == (kind is not RotaryTable)
