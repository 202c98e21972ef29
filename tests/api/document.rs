//! The OpenAPI document of a node, against what the node answers.

use std::collections::BTreeSet;
use std::time::Duration;

use cleave_tests::http::{Response, converse};
use cleave_tests::{Node, schema, small, wait_until};
use serde_json::{Value, json};

/// Method, path, the rest of the URL, body, and the status of the answer. In order: later ones need what earlier ones made.
const CALLS: &[(&str, &str, &str, &str, u16)] = &[
    ("GET", "/v1/openapi.json", "", "", 200),
    ("GET", "/v1/disks", "", "", 200),
    (
        "PUT",
        "/v1/disks/{id}",
        "",
        r#"{"disk":["IMAGE"],"queues":2,"limits":{"iops-total":5000}}"#,
        201,
    ),
    (
        "PUT",
        "/v1/disks/{id}",
        "",
        r#"{"disk":["IMAGE"],"queues":2,"limits":{"iops-total":5000}}"#,
        200,
    ),
    (
        "PUT",
        "/v1/disks/{id}",
        "",
        r#"{"disk":["IMAGE"],"queues":3}"#,
        409,
    ),
    (
        "PUT",
        "/v1/disks/{id}",
        "",
        r#"{"disk":["IMAGE"],"colour":3}"#,
        400,
    ),
    ("GET", "/v1/disks", "", "", 200),
    ("GET", "/v1/disks", "?full=1", "", 200),
    ("GET", "/v1/disks/{id}", "", "", 200),
    (
        "PATCH",
        "/v1/disks/{id}",
        "",
        r#"{"completion":"poll","limits":{"iops-total":0},"on_error":{"write":"hold"}}"#,
        200,
    ),
    (
        "PATCH",
        "/v1/disks/{id}",
        "",
        r#"{"vrings":{"0":"interrupt"},"spin_cpu_total":null,"split":"off"}"#,
        200,
    ),
    (
        "PATCH",
        "/v1/disks/{id}",
        "",
        r#"{"completion":"often"}"#,
        400,
    ),
    ("POST", "/v1/disks/{id}/resize", "", "", 200),
    ("POST", "/v1/disks/{id}/start", "", "", 200),
    ("POST", "/v1/disks/{id}/flush", "", "", 200),
    (
        "POST",
        "/v1/disks/{id}/quiesce",
        "",
        r#"{"seconds":30}"#,
        200,
    ),
    (
        "POST",
        "/v1/disks/{id}/quiesce",
        "",
        r#"{"seconds":30}"#,
        409,
    ),
    (
        "POST",
        "/v1/disks/{id}/quiesce",
        "",
        r#"{"seconds":0}"#,
        400,
    ),
    ("POST", "/v1/disks/{id}/resume", "", "", 200),
    ("POST", "/v1/disks/{id}/fail", "", "", 200),
    (
        "POST",
        "/v1/disks/{id}/snapshot",
        "",
        r#"{"to":"IMAGE.copy"}"#,
        422,
    ),
    ("GET", "/v1/events", "", "", 200),
    ("GET", "/v1/events", "?since=0&boot=another", "", 200),
    ("GET", "/v1/events", "?since=0", "", 400),
    ("GET", "/v1/node", "", "", 200),
    ("GET", "/healthz", "", "", 200),
    ("GET", "/readyz", "", "", 200),
    ("GET", "/metrics", "", "", 200),
    ("DELETE", "/v1/disks/{id}", "?mode=softly", "", 400),
    ("DELETE", "/v1/disks/{id}", "?mode=safe", "", 200),
];

/// Returns true if this is a refusal, or has the line of each disk before the events.
fn is_whole(answer: &Response) -> bool {
    let first = answer.body.split_inclusive('\n').next();
    let first = first.filter(|line| line.ends_with('\n'));
    let first = first.and_then(|line| serde_json::from_str::<Value>(line).ok());
    let disks = first.and_then(|line| line["disks"].as_u64());
    match answer.status {
        200 => disks.is_some_and(|disks| answer.body.matches('\n').count() as u64 > disks),
        _ => serde_json::from_str::<Value>(&answer.body).is_ok(),
    }
}

struct Api {
    node: Node,
    document: Value,
}

impl Api {
    fn start() -> Api {
        let node = Node::start();
        let document = node.get("/v1/openapi.json");
        Api { node, document }
    }

    fn ask(&self, method: &str, url: &str, body: &str) -> Response {
        if !url.contains("events") {
            return self.node.ask(method, url, body);
        }
        // They have no end, unless they are refused: it is what has come when no more comes.
        let request = format!("{method} {url} HTTP/1.0\r\nHost: node\r\n\r\n");
        for time in [1, 5, 25].map(Duration::from_secs) {
            let answer = converse(self.node.daemon.socket(), request.as_bytes(), time).unwrap();
            if let Some(answer) = Response::parse(&answer).filter(is_whole) {
                return answer;
            }
        }
        panic!("no whole answer to {method} {url}")
    }

    /// Checks that the document has the answer: its status, its type, and a schema that its body fits.
    fn judge(&self, method: &str, path: &str, answer: &Response) -> Result<(), String> {
        let operation = &self.document["paths"][path][method.to_lowercase()];
        let response = &operation["responses"][answer.status.to_string()];
        let content = response["content"]
            .as_object()
            .ok_or("this status is not in the document")?;
        let header = answer.header.to_lowercase();
        let kind = content.keys().find(|kind| header.contains(kind.as_str()));
        let kind = kind.ok_or_else(|| format!("another content type: {header}"))?;
        let fits = |value: &Value| schema::check(&self.document, &content[kind]["schema"], value);
        match kind.as_str() {
            "text/plain" => fits(&json!(answer.body)),
            "application/x-ndjson" => answer
                .body
                .lines()
                .try_for_each(|line| fits(&serde_json::from_str(line).unwrap())),
            _ => fits(&answer.json()),
        }
    }

    /// All that the document has.
    fn operations(&self) -> BTreeSet<(String, String)> {
        let paths = self.document["paths"].as_object().unwrap();
        let of = |(path, methods): (&String, &Value)| -> Vec<_> {
            let methods = methods.as_object().unwrap();
            methods
                .keys()
                .map(|method| (method.to_uppercase(), path.clone()))
                .collect()
        };
        paths.iter().flat_map(of).collect()
    }
}

#[test]
fn every_answer_is_in_the_document() {
    let api = Api::start();
    let image = api.node.daemon.scratch().image("a.img", 1 << 20);
    let mut called = BTreeSet::new();
    for (method, path, query, body, status) in CALLS {
        let url = format!("{}{query}", path.replace("{id}", "d1"));
        let body = body.replace("IMAGE", image.to_str().unwrap());
        if *path == "/v1/disks/{id}/resize" {
            // With all the figures of a disk that was used.
            cleave_tests::exercise(&mut api.node.open("d1", &small(1))).unwrap();
            assert!(wait_until(
                || api.node.disk("d1")["connected"] == json!(false)
            ));
        }
        let answer = api.ask(method, &url, &body);
        assert_eq!(answer.status, *status, "{method} {url}: {}", answer.body);
        let judged = api.judge(method, path, &answer);
        assert_eq!(judged, Ok(()), "{method} {url}: {}", answer.body);
        if !body.is_empty() && answer.status < 300 {
            let taken = &api.document["paths"][path][method.to_lowercase()]["requestBody"]["content"]
                ["application/json"];
            let sent = serde_json::from_str(&body).unwrap();
            assert_eq!(
                schema::check(&api.document, &taken["schema"], &sent),
                Ok(()),
                "{method} {url}: {body}"
            );
        }
        called.insert((method.to_string(), path.to_string()));
    }
    assert_eq!(called, api.operations(), "called, and documented");
    for (method, path) in api
        .operations()
        .iter()
        .filter(|(_, path)| path.contains("{id}"))
    {
        // A PUT adds it, if its body is right.
        let body = if method == "PATCH" { "{}" } else { "" };
        let answer = api.ask(method, &path.replace("{id}", "nobody"), body);
        assert_eq!(
            answer.status,
            if method == "PUT" { 400 } else { 404 },
            "{method} {path}"
        );
        assert_eq!(
            api.judge(method, path, &answer),
            Ok(()),
            "{method} {path}: {}",
            answer.body
        );
        let answer = api.ask(method, &path.replace("{id}", "%ff"), body);
        assert_eq!(answer.status, 400, "{method} {path}");
        assert_eq!(
            api.judge(method, path, &answer),
            Ok(()),
            "{method} {path}: {}",
            answer.body
        );
    }
    api.node.daemon.finish();
}

#[test]
fn what_the_document_does_not_have_is_refused() {
    let api = Api::start();
    let refusal = json!({"$ref": "#/components/schemas/Problem"});
    let paths = api.document["paths"].as_object().unwrap();
    for (path, methods) in paths {
        for method in ["GET", "PUT", "POST", "PATCH", "DELETE"] {
            if methods.get(method.to_lowercase()).is_some() {
                continue;
            }
            let answer = api.ask(method, &path.replace("{id}", "d1"), "");
            assert_eq!(answer.status, 405, "{method} {path}");
            assert_eq!(
                schema::check(&api.document, &refusal, &answer.json()),
                Ok(()),
                "{method} {path}"
            );
        }
    }
    for path in ["/", "/v1", "/v2/disks", "/v1/disks/d1/sleep", "/v1/disk"] {
        let answer = api.ask("GET", path, "");
        assert_eq!(answer.status, 404, "{path}");
        assert_eq!(
            schema::check(&api.document, &refusal, &answer.json()),
            Ok(()),
            "{path}"
        );
    }
    assert_eq!(
        api.document,
        serde_json::from_str::<Value>(include_str!("../../docs/openapi.json")).unwrap()
    );
    api.node.daemon.finish();
}
