"""OpenEngine (openengine.v1), the engine protocol of routers such as Dynamo."""
