"""Lookup of a vector for each id."""

from typing import Any

from pytensor.graph.basic import Variable
from pytensor.tensor import TensorLike, as_tensor
from pytensor.tensor.variable import TensorVariable

from pytensor_ml.base import Layer, UnaryLayerOp, resolve_layer_name
from pytensor_ml.layers.half import floats_of
from pytensor_ml.layers.linear import LinearLayer, check_width
from pytensor_ml.params import trainable_parameter
from pytensor_ml.state import Initializer, XavierNormalInitializer


class EmbeddingLayer(UnaryLayerOp):
    """The op of :class:`Embedding`: inputs ids and W."""

    # Its graph does without them; saved graphs name them.
    __props__ = ("n_embeddings", "n_features")

    n_embeddings: int
    n_features: int

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        ids, W = inputs
        return [floats_of(W[ids])]


class Embedding(Layer):
    r"""Replace each id by its row of a table.

    .. math:: Y_{\dots i} = W_{\mathrm{ids}_{\dots} i}

    Parameters
    ----------
    name : str, optional
        Name of the layer.
    n_embeddings : int
        Number of ids; they run from 0.
    n_features : int
        Width of a row.
    weight_initializer : Initializer, optional
        Law of W, of shape (n_embeddings, n_features). Default is Xavier-normal.

    Raises
    ------
    IndexError
        When the compiled function runs on C or Numba, if an id has no row. JAX and MLX cannot
        raise, and give NaN in its place.

    Examples
    --------
    >>> from pytensor_ml.layers import Embedding, Input
    >>> ids = Input("ids", shape=(None, None), dtype="int64")
    >>> Embedding("tokens", n_embeddings=1000, n_features=64)(ids).type.shape
    (None, None, 64)
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        n_embeddings: int,
        n_features: int,
        weight_initializer: Initializer | None = None,
    ):
        self.name = resolve_layer_name(name, "Embedding")
        self.n_embeddings = n_embeddings
        self.n_features = n_features
        self.W = trainable_parameter(
            f"{self.name}_W",
            shape=(n_embeddings, n_features),
            initializer=weight_initializer,
            default=XavierNormalInitializer(),
            layer_name=self.name,
        )

    def __call__(self, ids: TensorLike) -> TensorVariable:
        ids = as_tensor(ids)
        if ids.type.dtype not in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"):
            raise TypeError(
                f"{self.name} looks rows up by integer id, but got {ids.type}. Cast them to int64."
            )
        op = EmbeddingLayer(n_embeddings=self.n_embeddings, n_features=self.n_features)
        return op(ids, self.W, name=f"{self.name}_output")

    def head(self, X: TensorLike) -> TensorVariable:
        r"""Score every id with the same table, :math:`X W^\top`: a tied output head.

        Parameters
        ----------
        X : tensor of shape (..., n_features)

        Returns
        -------
        tensor of shape (..., n_embeddings)
        """
        X = as_tensor(X)
        check_width(X, self.n_features, f"The head of {self.name}")
        op = LinearLayer(n_in=self.n_features, n_out=self.n_embeddings, bias=False)
        return op(X, self.W.T, name=f"{self.name}_head_output")
