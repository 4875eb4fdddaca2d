"""OpenEngine (openengine.v1), the protocol by which routers such as Dynamo's use engines of any
make."""
