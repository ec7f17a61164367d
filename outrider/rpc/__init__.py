"""gRPC at the edge: options, codec, links, server start-up. Nothing behind this package knows protobuf."""
