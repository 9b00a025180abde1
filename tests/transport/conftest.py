"""Eight CPU devices in one process."""

import jax
import pytest

pytest.register_assert_rewrite("support.transport_contract")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
