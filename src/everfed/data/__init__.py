"""Data sets: embedded digits, files in a data folder, or one's own arrays."""

from everfed.data.cifar import cifar10, cifar100
from everfed.data.digit10 import emnist_digits, mnist_m, svhn, usps
from everfed.data.digits import digits
from everfed.data.files import data_folder, fashion_mnist, mnist, npz
from everfed.data.folders import dn4il, folders, pacs, tiny_imagenet, vlcs
from everfed.data.glue import glue
from everfed.data.join import digit10, join, join_files
from everfed.data.leaf import femnist, shakespeare
from everfed.data.mapped import npy, parquet
from everfed.data.movielens import movielens
from everfed.data.permuted import permute, permuted
from everfed.data.series import elec2, series, weather
from everfed.data.table import Data, arrays, from_dataset, sites, standardised

__all__ = [
    "Data", "arrays", "cifar10", "cifar100", "data_folder", "digit10", "digits", "dn4il", "elec2",
    "emnist_digits", "fashion_mnist", "femnist", "folders", "from_dataset", "glue", "join",
    "join_files", "mnist", "mnist_m", "movielens", "npy", "npz", "pacs", "parquet", "permute",
    "permuted", "series", "shakespeare", "sites", "standardised", "svhn", "tiny_imagenet", "usps",
    "vlcs", "weather",
]  # fmt: skip
