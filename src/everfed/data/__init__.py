"""Data sets: embedded digits, files in a data folder, or one's own arrays."""

from everfed.data.digits import digits
from everfed.data.files import fashion_mnist, mnist, npz
from everfed.data.table import Data, arrays, from_dataset, sites, standardised

__all__ = [
    "Data",
    "arrays",
    "digits",
    "fashion_mnist",
    "from_dataset",
    "mnist",
    "npz",
    "sites",
    "standardised",
]
