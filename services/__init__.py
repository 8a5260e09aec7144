"""The four processes: buffer, context, dgds, engine; and the KV pool's. None imports another (engine -> dgds.client apart)."""
