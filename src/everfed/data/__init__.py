"""Data sets: embedded digits, files in a data folder, or one's own arrays."""

from everfed.data.digits import digits
from everfed.data.files import fashion_mnist, mnist, npz
from everfed.data.series import elec2, series, weather
from everfed.data.table import Data, arrays, from_dataset, sites, standardised

__all__ = [
    "Data", "arrays", "digits", "elec2", "fashion_mnist", "from_dataset", "mnist", "npz", "series",
    "sites", "standardised", "weather",
]  # fmt: skip
