"""A collector of spans: takes OTLP over HTTP, or does not."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Receiver(ThreadingHTTPServer):
    """Keeps the spans of every message that it answers with `status` 200; `stuck`: answers nothing."""

    daemon_threads = True

    def __init__(self, port=0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.status, self.rejects, self.stuck = 200, 0, threading.Event()
        self.stuck.set()
        self.spans, self.tries, self.resources = [], 0, []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def named(self, name):
        return [span for span in self.spans if span.name == name]

    def close(self):
        self.stuck.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server = self.server
        server.tries += 1
        server.stuck.wait(60)
        if self.path != "/v1/traces":
            self.answer(404, b"")
            return
        answer = ExportTraceServiceResponse()
        if server.status == 200:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                server.resources.append(attributes(resource.resource))
                for scope in resource.scope_spans:
                    server.spans += scope.spans
            if server.rejects:
                answer.partial_success.rejected_spans = server.rejects
                answer.partial_success.error_message = "too many attributes"
        self.answer(server.status, answer.SerializeToString())

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def attributes(of):
    """The attributes of a span or a resource."""
    found = {}
    for each in of.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


if __name__ == "__main__":  # by hand: prints every span that comes
    receiver = Receiver(int(sys.argv[1]))
    known = 0
    while True:
        threading.Event().wait(1)
        for span in receiver.spans[known:]:
            print(span.name, span.trace_id.hex(), span.span_id.hex(), json.dumps(attributes(span)))
        known = len(receiver.spans)
