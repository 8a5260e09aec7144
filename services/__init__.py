"""The four processes, buffer, context, dgds and engine, and the KV pool's.

None imports another (engine -> dgds.client apart).
"""
