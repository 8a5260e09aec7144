"""The four processes: buffer, context, dgds, engine. None imports another (engine -> dgds.client apart)."""
