//! Judges a JSON value by a schema of an OpenAPI document: the part of JSON Schema that ours uses. A keyword that it does not
//! know is a fault, since it would go unjudged.

use serde_json::{Map, Value};

/// Keywords that say nothing about what is valid here.
const SILENT: [&str; 8] = [
    "description",
    "default",
    "format",
    "title",
    "minimum",
    "maximum",
    "pattern",
    "x-enum-varnames",
];

/// The pattern of names that are numbers.
const DIGITS: &str = "^\\d+$";

/// Why a value does not fit the schema; `root` is the whole document, in which references point.
pub fn check(root: &Value, schema: &Value, value: &Value) -> Result<(), String> {
    let Value::Object(schema) = schema else {
        return match schema {
            Value::Bool(true) => Ok(()),
            _ => Err(format!("nothing fits {schema}")),
        };
    };
    schema.iter().try_for_each(|(keyword, rule)| {
        judged(root, schema, (keyword, rule), value).map_err(|why| format!("{keyword}: {why}"))
    })
}

/// Judges by a keyword about the value as a whole.
fn judged(
    root: &Value,
    schema: &Map<String, Value>,
    (keyword, rule): (&str, &Value),
    value: &Value,
) -> Result<(), String> {
    let fits = |schema: &Value| check(root, schema, value);
    match keyword {
        "$ref" => {
            let target = rule
                .as_str()
                .and_then(|to| root.pointer(to.trim_start_matches('#')));
            fits(target.ok_or_else(|| format!("{rule} leads nowhere"))?)
        }
        "type" => {
            let kinds = if rule.is_array() {
                list(rule)
            } else {
                vec![rule.clone()]
            };
            let is_one = kinds
                .iter()
                .any(|kind| is_of(kind.as_str().unwrap_or_default(), value));
            ensure(is_one, || format!("{value} is not {rule}"))
        }
        "enum" => ensure(list(rule).contains(value), || {
            format!("{value} is none of {rule}")
        }),
        "const" => ensure(rule == value, || format!("{value} is not {rule}")),
        "allOf" => list(rule).iter().try_for_each(fits),
        "anyOf" | "oneOf" => {
            let fits_one = list(rule).iter().any(|rule| fits(rule).is_ok());
            ensure(fits_one, || format!("{value} fits none"))
        }
        "if" => match (fits(rule), schema.get("then")) {
            (Ok(()), Some(then)) => fits(then),
            _ => Ok(()),
        },
        "then" => Ok(()),
        keyword if SILENT.contains(&keyword) => Ok(()),
        keyword => judged_inside(root, schema, (keyword, rule), value),
    }
}

/// Judges by a keyword about the entries of a list or an object.
fn judged_inside(
    root: &Value,
    schema: &Map<String, Value>,
    (keyword, rule): (&str, &Value),
    value: &Value,
) -> Result<(), String> {
    let named = |name: &str, schema: &Value, field: &Value| {
        check(root, schema, field).map_err(|why| format!("{name}: {why}"))
    };
    let length = list(value).len() as u64;
    match keyword {
        "items" => list(value)
            .iter()
            .try_for_each(|item| check(root, rule, item)),
        "prefixItems" => {
            let mut pairs = list(rule).into_iter().zip(list(value));
            pairs.try_for_each(|(schema, item)| check(root, &schema, &item))
        }
        "minItems" => ensure(!value.is_array() || Some(length) >= rule.as_u64(), || {
            "too short".to_owned()
        }),
        "maxItems" => ensure(!value.is_array() || Some(length) <= rule.as_u64(), || {
            "too long".to_owned()
        }),
        "properties" => {
            let known = fields(value)
                .into_iter()
                .filter_map(|(name, field)| Some((rule.get(&name)?, name, field)));
            known
                .into_iter()
                .try_for_each(|(schema, name, field)| named(&name, schema, &field))
        }
        "required" => list(rule).iter().try_for_each(|name| {
            let is_there =
                !value.is_object() || value.get(name.as_str().unwrap_or_default()).is_some();
            ensure(is_there, || format!("{name} is missing"))
        }),
        "patternProperties" => {
            let schema = rule
                .get(DIGITS)
                .ok_or("only names of digits are known to this check")?;
            let mut numbered = fields(value)
                .into_iter()
                .filter(|(name, _)| is_number(name));
            numbered.try_for_each(|(name, field)| named(&name, schema, &field))
        }
        "additionalProperties" => {
            let known = schema.get("properties");
            let numbers = schema.contains_key("patternProperties");
            let is_other = |name: &str| {
                known.and_then(|known| known.get(name)).is_none() && !(numbers && is_number(name))
            };
            let mut others = fields(value).into_iter().filter(|(name, _)| is_other(name));
            others.try_for_each(|(name, field)| named(&name, rule, &field))
        }
        "maxProperties" => {
            let count = fields(value).len() as u64;
            ensure(rule.as_u64() >= Some(count), || {
                format!("{count} fields are too many")
            })
        }
        keyword => Err(format!("{keyword} is unknown to this check")),
    }
}

fn ensure(holds: bool, why: impl FnOnce() -> String) -> Result<(), String> {
    holds.then_some(()).ok_or_else(why)
}

fn list(value: &Value) -> Vec<Value> {
    value.as_array().cloned().unwrap_or_default()
}

fn is_number(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit())
}

fn fields(value: &Value) -> Map<String, Value> {
    value.as_object().cloned().unwrap_or_default()
}

fn is_of(kind: &str, value: &Value) -> bool {
    match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_does_not_fit_is_found() {
        let root = json!({"a": {"type": "integer"}});
        let rows = [
            (json!({"type": ["string", "null"]}), json!(null), true),
            (json!({"type": "string"}), json!(1), false),
            (json!({"$ref": "#/a"}), json!(1), true),
            (json!({"$ref": "#/a"}), json!("1"), false),
            (json!({"$ref": "#/b"}), json!(1), false),
            (
                json!({"anyOf": [{"type": "string"}, {"$ref": "#/a"}]}),
                json!(1),
                true,
            ),
            (
                json!({"anyOf": [{"type": "string"}, {"$ref": "#/a"}]}),
                json!(true),
                false,
            ),
            (
                json!({"properties": {"x": {"$ref": "#/a"}}, "additionalProperties": false}),
                json!({"x": 1}),
                true,
            ),
            (
                json!({"properties": {"x": {"$ref": "#/a"}}, "additionalProperties": false}),
                json!({"y": 1}),
                false,
            ),
            (json!({"required": ["x"]}), json!({}), false),
            (json!({"items": {"enum": [1, 2]}}), json!([1, 3]), false),
            (
                json!({"if": {"required": ["x"]}, "then": {"required": ["y"]}}),
                json!({"x": 1}),
                false,
            ),
            (
                json!({"if": {"required": ["x"]}, "then": {"required": ["y"]}}),
                json!({}),
                true,
            ),
            (json!({"not": {}}), json!(1), false),
            (json!(false), json!(1), false),
        ];
        for (schema, value, fits) in rows {
            assert_eq!(
                check(&root, &schema, &value).is_ok(),
                fits,
                "{schema}: {value}"
            );
        }
    }
}
