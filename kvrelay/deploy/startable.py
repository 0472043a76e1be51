"""What of a configuration no process or no cluster on this machine can be started with. Nothing is started, bound or
written here, so that who only asks (`kvrelay doctor`) is told the same as who starts."""

from __future__ import annotations

from kvrelay.config import Config, MockConfig
from kvrelay.deploy import cores
from kvrelay.deploy.vllm_args import require_allowed
from kvrelay.errors import Misconfigured
from kvrelay.router.keys import Keyring
from kvrelay.router.promises import Promises

_NO_KEY = b""
"""What keys and tenants are called does not hang on the cluster's."""


def require_sound(config: Config) -> None:
    """Raise ``Misconfigured``, beginning with the key, for what a router or a worker of ``config`` would refuse."""
    Promises(config, Keyring(config.router.api_keys, _NO_KEY).tenants)
    if not config.mock.enabled:
        require_allowed(config.worker.vllm_args)
        _require_cores(config.worker.cpus)


def require_cluster(config: Config) -> None:
    """Raise ``Misconfigured``, beginning with the key, unless ``config`` describes a whole cluster."""
    _refuse_half_a_cluster(config)
    if config.cluster.stores > 1 and (config.store.peer_port or config.store.advertise):
        raise Misconfigured("store.peer_port and store.advertise name one store; leave them out with two stores")
    _refuse_one_workers_settings(config)
    _refuse_idle_mock(config)
    _refuse_idle_codecs(config)


def is_of_one_worker(config: Config) -> bool:
    """Whether it is a file for `kvrelay worker`, which describes no cluster."""
    return config.worker.role is not None or bool(config.worker.advertise)


def _require_cores(cpus: str) -> None:
    if not cpus:
        return
    have = cores.available()
    if lacking := set(cores.parse(cpus)) - set(have):
        listed, there = cores.ranges(tuple(lacking)), cores.ranges(have)
        raise Misconfigured(f"worker.cpus: {listed} cannot be used here; the cores of this process are {there}")


def _refuse_half_a_cluster(config: Config) -> None:
    cluster = config.cluster
    if not cluster.colocated and not (cluster.prefill and cluster.decode):
        raise Misconfigured(
            f"cluster.prefill, cluster.decode: {cluster.prefill} and {cluster.decode}; a cluster needs at least one "
            "prefill and one decode worker, or one of cluster.colocated (--colocated)"
        )


def _refuse_idle_mock(config: Config) -> None:
    """What has no effect is not meant so."""
    if not config.mock.enabled and config.mock != MockConfig():
        raise Misconfigured(
            "[mock], --time-scale and --device are for simulated workers: add --mock PxD or mock.enabled = true"
        )


def _refuse_one_workers_settings(config: Config) -> None:
    if config.worker.role is not None:
        raise Misconfigured(
            "worker.role is for `kvrelay worker`; a cluster's workers are counted by cluster.prefill, cluster.decode "
            "and cluster.colocated (--prefill, --decode, --colocated)"
        )
    if config.worker.advertise:
        raise Misconfigured("worker.advertise names one worker, for `kvrelay worker`; leave it out of a whole cluster")


def _refuse_idle_codecs(config: Config) -> None:
    """What pages are named after must be able to happen to them."""
    if config.store.lossy is not None and config.cluster.stores == 1:
        raise Misconfigured("store.lossy_codec is for pages that go to another store; set cluster.stores to 2")
