"""The real world: meshes, batches, compiled steps and KV transfers on JAX devices."""
