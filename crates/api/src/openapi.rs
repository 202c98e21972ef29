//! The OpenAPI document of a node, made from the table of paths and the types of the bodies.

use schemars::generate::{SchemaGenerator, SchemaSettings};
use serde_json::{Map, Value, json};

use crate::content::BodyContent;
use crate::event::EventName;
use crate::problem::Problem;
use crate::table::{Operation, Query, QueryValue, Route, Tag};

/// Returns the OpenAPI document.
pub fn document() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
    });
    let mut generator = settings.into_generator();
    let mut paths = Map::new();
    for each in Operation::ALL {
        let route = each.route();
        let methods = paths.entry(route.path).or_insert_with(|| json!({}));
        methods[route.method.name().to_lowercase()] = operation(*each, &route, &mut generator);
    }
    let event = event(&mut generator);
    let mut schemas = generator.take_definitions(true);
    schemas.insert("Event".to_owned(), event);
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Cleave node",
            "version": "1",
            "description": "The control socket of `cleave node`: HTTP/1.1 on a unix socket.",
            "license": {"name": "MIT OR Apache-2.0"},
        },
        "servers": [{
            "url": "http://localhost",
            "description": "Connect to the unix socket of --control. The name of the host means nothing.",
        }],
        "tags": Tag::ALL.iter().map(|tag| json!({"name": tag})).collect::<Vec<_>>(),
        "paths": paths,
        "components": {"schemas": schemas},
    })
}

fn operation(operation: Operation, route: &Route, generator: &mut SchemaGenerator) -> Value {
    let mut responses = Map::new();
    for (status, content) in route.answers {
        let content = described(*content, generator);
        let response = json!({"description": meaning(*status), "content": content});
        responses.insert(status.to_string(), response);
    }
    let problem = generator.subschema_for::<Problem>();
    for status in route.refusals {
        let content = json!({"application/problem+json": {"schema": problem}});
        let response = json!({"description": meaning(*status), "content": content});
        responses.insert(status.to_string(), response);
    }
    let mut parameters = Vec::new();
    if route.path.contains("{id}") {
        let about = "The id of the disk.";
        let id = json!({"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"});
        parameters.push(json!({"name": "id", "in": "path", "required": true, "description": about, "schema": id}));
    }
    if route.changes_a_disk() {
        let about = "Only if the disk is of this generation, in double quotes: otherwise 412.";
        parameters.push(json!({"name": "If-Match", "in": "header", "description": about, "schema": {"type": "string"}}));
    }
    parameters.extend(route.query.iter().map(parameter));
    let mut all = json!({
        "operationId": operation,
        "tags": [route.tag],
        "summary": route.does.trim(),
        "parameters": parameters,
        "responses": responses,
    });
    if let Some(body) = route.body {
        let content = described(body, generator);
        all["requestBody"] = json!({"required": route.needs_body, "content": content});
    }
    all
}

fn parameter(query: &Query) -> Value {
    let mut schema = match query.values {
        QueryValue::Word(words) => {
            let (values, names): (Vec<_>, Vec<_>) = words.iter().copied().unzip();
            json!({"type": "string", "enum": values, "x-enum-varnames": names})
        }
        QueryValue::Number => json!({"type": "integer", "format": "uint64", "minimum": 0}),
        QueryValue::Text => json!({"type": "string"}),
    };
    if let Some(default) = query.default {
        schema["default"] = json!(default);
    }
    json!({"name": query.name, "in": "query", "description": query.about, "schema": schema})
}

/// Returns the meaning of a status.
fn meaning(status: u16) -> &'static str {
    match status {
        200 => "Done",
        201 => "Made",
        202 => "Under way: it takes longer",
        400 => "The request is not valid",
        404 => "There is no such disk",
        408 => "The body did not come in time",
        409 => "The state of the disk does not permit it",
        412 => "The disk is of another generation",
        413 => "The body is broken or too long",
        422 => "The storage of the disk does not permit it",
        503 => "Not in time, not yet, or too many at once",
        507 => "The node has no room for another disk",
        _ => "A fault of the daemon or its storage",
    }
}

/// Describes a body, by its media type.
fn described(content: BodyContent, generator: &mut SchemaGenerator) -> Value {
    let mut described = json!({content.media: {"schema": (content.schema)(generator)}});
    if content.media == BodyContent::EVENTS.media {
        // A generator of clients that does not know lines of JSON would leave the reply out. It takes bytes.
        let bytes = json!({"type": "string", "format": "binary"});
        described["application/octet-stream"] = json!({"schema": bytes});
    }
    described
}

/// Describes an event: a line of JSON.
fn event(generator: &mut SchemaGenerator) -> Value {
    json!({
        "description": "An event. Further fields depend on what happened.",
        "type": "object",
        "properties": {
            "seq": {
                "type": "integer", "format": "uint64", "minimum": 0,
                "description": "The number of the event. They count from 1 with each start of the process. `listening` and `disk` \
                                have the number of the event before them.",
            },
            "time": {"type": "number", "format": "double", "description": "Seconds since 1970."},
            "event": generator.subschema_for::<EventName>(),
            "disk": {"type": "string", "description": "The id of the disk. A line that is not about a disk has none."},
            "boot": {"type": "string", "description": "Of `listening`: names this start of the process."},
            "replayed": {"type": "boolean", "description": "Of `listening`: the events after `since` follow, and no `disk`."},
            "disks": {"type": "integer", "minimum": 0, "description": "Of `listening`: number of lines `disk` that follow."},
        },
        "required": ["seq", "time", "event"],
    })
}

#[cfg(test)]
mod tests {
    use cleave_config::Change;

    use super::*;

    #[test]
    fn the_document_is_that_of_the_sources() {
        let written = include_str!("../../../docs/openapi.json");
        let document = serde_json::to_string_pretty(&document()).unwrap() + "\n";
        assert!(
            written == document,
            "docs/openapi.json is out of date: cargo run -- node --openapi > docs/openapi.json"
        );
    }

    #[test]
    fn the_page_of_the_file_has_each_field() {
        let page = include_str!("../../../docs/disk-file.md");
        let document = document();
        let fields = &document["components"]["schemas"]["DiskConfig"]["properties"];
        for name in fields.as_object().unwrap().keys() {
            assert!(page.contains(&format!("`{name}`")), "{name}");
        }
    }

    /// A client that is generated shows them, and checks nothing that is not there.
    #[test]
    fn every_field_is_described_and_null_is_only_where_it_is_taken() {
        let document = document();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        for (name, schema) in schemas {
            let fields = schema["properties"].as_object().into_iter().flatten();
            for (field, of) in fields {
                let is_described = of["description"].is_string() || of["$ref"].is_string();
                assert!(is_described, "{name}.{field}");
            }
        }
        assert_eq!(schemas["DiskConfig"]["required"], json!(["disk"]));
        let change = schemas["Change"]["properties"].as_object().unwrap();
        for (field, of) in change {
            let body = json!({field: null}).to_string();
            let takes_null = Change::from_json(body.as_bytes()).is_ok();
            let kinds = of["type"].as_array();
            let has_null = kinds.is_some_and(|kinds| kinds.contains(&json!("null")));
            assert_eq!(has_null, takes_null, "{field}: {of}");
            assert!(of["default"].is_null(), "{field} stays if it is left out");
        }
    }
}
