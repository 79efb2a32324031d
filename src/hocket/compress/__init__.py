"""How a gradient or a model shrinks on the wire. Importing this fills the registry."""

from hocket.compress import casts, dgc, powersgd, quantized, signs, sparsified
from hocket.compress.scheme import Compressor, Identity, compressor, make, text_of

__all__ = [
    "Compressor",
    "Identity",
    "casts",
    "compressor",
    "dgc",
    "make",
    "powersgd",
    "quantized",
    "signs",
    "sparsified",
    "text_of",
]
