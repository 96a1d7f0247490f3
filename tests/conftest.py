"""What every test runs under."""

from hypothesis import HealthCheck, settings

# An example may take as long as it takes: a busy machine is no fault of the code under test.
settings.register_profile("fastdp", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fastdp")
