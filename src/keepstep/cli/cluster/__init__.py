"""The commands of a job on several nodes.

Importing them raises `keepstep.errors.ConfigurationError` if the extra ``cluster`` is not installed.
"""

from keepstep.programs import check_installed

check_installed("several nodes", ("grpc", "cryptography"), "cluster")
