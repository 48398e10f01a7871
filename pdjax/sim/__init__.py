"""The modelled world: devices, latency models, and executors that answer in virtual time."""
