//! Judges a JSON value by a schema of an OpenAPI document: the part of JSON Schema that ours uses. A keyword that it does not
//! know is a fault, since it would go unjudged.

use serde_json::{Map, Value};

/// Keywords that say nothing about what is valid here.
const SILENT: [&str; 7] = [
    "description",
    "default",
    "format",
    "title",
    "minimum",
    "maximum",
    "pattern",
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

fn judged(
    root: &Value,
    schema: &Map<String, Value>,
    rule: (&str, &Value),
    value: &Value,
) -> Result<(), String> {
    let fits = |schema: &Value| check(root, schema, value);
    let all = |rule: &Value| rule.as_array().cloned().unwrap_or_default();
    match rule {
        ("$ref", to) => {
            let to = to.as_str().unwrap_or_default();
            let target = root.pointer(to.trim_start_matches('#'));
            fits(target.ok_or_else(|| format!("{to} leads nowhere"))?)
        }
        ("type", kinds) => {
            let kinds = if kinds.is_array() {
                all(kinds)
            } else {
                vec![kinds.clone()]
            };
            let fits = kinds
                .iter()
                .any(|kind| is_of(kind.as_str().unwrap_or_default(), value));
            fits.then_some(())
                .ok_or_else(|| format!("{value} is not {kinds:?}"))
        }
        ("enum", values) => {
            let fits = all(values).contains(value);
            fits.then_some(())
                .ok_or_else(|| format!("{value} is none of {values}"))
        }
        ("const", only) => (only == value)
            .then_some(())
            .ok_or_else(|| format!("{value} is not {only}")),
        ("allOf", rules) => all(rules).iter().try_for_each(fits),
        ("anyOf" | "oneOf", rules) => {
            let tried: Result<Vec<()>, _> = all(rules)
                .iter()
                .map(|rule| fits(rule).map_or(Ok(()), Err))
                .collect();
            tried.map_or(Ok(()), |_| Err(format!("{value} fits none")))
        }
        ("if", condition) => match (fits(condition), schema.get("then")) {
            (Ok(()), Some(then)) => fits(then),
            _ => Ok(()),
        },
        ("then", _) => Ok(()),
        ("items", items) => all(value)
            .iter()
            .try_for_each(|item| check(root, items, item)),
        ("prefixItems", items) => {
            let pairs = all(items).into_iter().zip(all(value));
            pairs
                .into_iter()
                .try_for_each(|(schema, item)| check(root, &schema, &item))
        }
        ("minItems", least) => {
            let is_long = value
                .as_array()
                .is_none_or(|items| items.len() as u64 >= least.as_u64().unwrap_or(0));
            is_long
                .then_some(())
                .ok_or_else(|| format!("{value} is too short"))
        }
        ("maxItems", most) => {
            let is_short = value
                .as_array()
                .is_none_or(|items| items.len() as u64 <= most.as_u64().unwrap_or(0));
            is_short
                .then_some(())
                .ok_or_else(|| format!("{value} is too long"))
        }
        ("properties", properties) => {
            fields(value)
                .iter()
                .try_for_each(|(name, field)| match properties.get(name) {
                    Some(schema) => {
                        check(root, schema, field).map_err(|why| format!("{name}: {why}"))
                    }
                    None => Ok(()),
                })
        }
        ("required", names) => all(names).iter().try_for_each(|name| {
            let name = name.as_str().unwrap_or_default();
            let is_there = !value.is_object() || value.get(name).is_some();
            is_there
                .then_some(())
                .ok_or_else(|| format!("{name} is missing"))
        }),
        ("patternProperties", patterns) => {
            let schema = patterns
                .get(DIGITS)
                .ok_or("only names of digits are known to this check")?;
            let mut numbered = fields(value)
                .into_iter()
                .filter(|(name, _)| is_number(name));
            numbered.try_for_each(|(name, field)| {
                check(root, schema, &field).map_err(|why| format!("{name}: {why}"))
            })
        }
        ("additionalProperties", schema_of_others) => {
            let known = schema.get("properties");
            let numbers = schema.contains_key("patternProperties");
            let mut others = fields(value)
                .into_iter()
                .filter(|(name, _)| !numbers || !is_number(name));
            others.try_for_each(
                |(name, field)| match known.and_then(|known| known.get(&name)) {
                    Some(_) => Ok(()),
                    None => check(root, schema_of_others, &field)
                        .map_err(|why| format!("{name}: {why}")),
                },
            )
        }
        (keyword, _) if SILENT.contains(&keyword) => Ok(()),
        (keyword, _) => Err(format!("{keyword} is unknown to this check")),
    }
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
