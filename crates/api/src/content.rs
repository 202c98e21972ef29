//! The contents of bodies.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

use crate::disk::{DiskRow, NodeDisk};

/// The contents of a body: a media type, and a schema.
#[derive(Debug, Clone, Copy)]
pub struct BodyContent {
    pub(crate) media: &'static str,
    pub(crate) schema: fn(&mut SchemaGenerator) -> Schema,
}

impl BodyContent {
    /// All disks, each as its row or in full.
    pub(crate) const DISKS: BodyContent = BodyContent {
        media: "application/json",
        schema: |generator| {
            let each = [
                generator.subschema_for::<NodeDisk>(),
                generator.subschema_for::<DiskRow>(),
            ];
            json_schema!({"type": "array", "items": {"anyOf": each}})
        },
    };
    /// Lines without end, each an event.
    pub(crate) const EVENTS: BodyContent = BodyContent {
        media: "application/x-ndjson",
        schema: |_| json_schema!({"$ref": "#/components/schemas/Event"}),
    };
    /// The OpenAPI document.
    pub(crate) const DOCUMENT: BodyContent = BodyContent {
        media: "application/json",
        schema: |_| json_schema!({"type": "object"}),
    };
    /// A word for people and probes.
    pub(crate) const WORD: BodyContent = BodyContent {
        media: "text/plain",
        schema: |_| json_schema!({"type": "string"}),
    };
    /// The text format of Prometheus.
    pub(crate) const METRICS: BodyContent = BodyContent {
        media: "text/plain",
        schema: |_| json_schema!({"type": "string"}),
    };
}

/// Returns the contents of a body that is a `T`.
pub(crate) const fn json<T: JsonSchema>() -> BodyContent {
    BodyContent {
        media: "application/json",
        schema: |generator| generator.subschema_for::<T>(),
    }
}
