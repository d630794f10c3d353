"""Who is in the cluster, and which of them this process is: `mx.distribute.cluster_resolver`."""

from mirrax._src.cluster.resolver_jax import JaxClusterResolver as JaxClusterResolver
from mirrax._src.cluster.resolver_kubernetes import (
    KubernetesClusterResolver as KubernetesClusterResolver,
)
from mirrax._src.cluster.resolver_kubernetes import (
    KubernetesExecutableLocation as KubernetesExecutableLocation,
)
from mirrax._src.cluster.resolver_slurm import (
    SlurmClusterResolver as SlurmClusterResolver,
)
from mirrax._src.cluster.resolver_tf_config import (
    TFConfigClusterResolver as TFConfigClusterResolver,
)
from mirrax._src.cluster.resolvers import ClusterResolver as ClusterResolver
from mirrax._src.cluster.resolvers import SimpleClusterResolver as SimpleClusterResolver
from mirrax._src.cluster.resolvers import UnionResolver as UnionResolver
from mirrax._src.cluster.spec import ClusterSpec as ClusterSpec

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "JaxClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "UnionResolver",
]
