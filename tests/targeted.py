"""Small experiments of every algorithm that are compiled for a chip."""

from launch import build
from launch.config import registry
from tests import test_contract
from tests.toys import taught

COMMON = test_contract.COMMON | {"model": "mlp"}
OPTIONS = test_contract.OWN_OPTIONS | {"fedrep": {"local_epochs": 4}}


def experiment(chip, name, dataset, **more):
    """Five clients side by side."""
    options = {"dataset": dataset} | COMMON | OPTIONS.get(name, {})
    options |= taught.options(name, dataset)
    options |= {"target": chip, "algo": name, "client_chunk": 5}
    known = {*registry.fields_of(name), "target"}
    return build.experiment(**{k: v for k, v in (options | more).items() if k in known})
