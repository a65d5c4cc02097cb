//! The JSON Schema of the configuration, for editors and for programs that write one. It comes from the types
//! that the daemon reads the file into, and says of it what a schema can say: contradictions between its parts are
//! `sense.rs`'s.

use serde_json::{Map, Value, json};
use utoipa::{PartialSchema, ToSchema};

use super::Config;

/// Returns the schema as text.
pub fn text() -> String {
    format!("{:#}\n", whole())
}

/// Returns the schema. It is one of draft 7, which editors know.
fn whole() -> Value {
    let mut parts = Vec::new();
    Config::schemas(&mut parts);
    let value = |schema: &_| serde_json::to_value(schema).expect("a schema is plain data");
    let definitions: Map<_, _> = parts.iter().map(|(name, schema)| (name.clone(), value(schema))).collect();
    let mut whole = value(&Config::schema());
    whole["$schema"] = json!("http://json-schema.org/draft-07/schema#");
    whole["title"] = json!("Configuration of tasukid");
    whole["definitions"] = Value::Object(definitions);
    for_toml(&mut whole);
    whole
}

/// Returns the least and the most that the key at the end of this path may have, as far as the schema says so. Places in
/// lists are not part of a path.
pub fn range_of(path: &[&str]) -> [Option<i64>; 2] {
    let whole = whole();
    let its = property(&whole, &whole, path);
    ["minimum", "maximum"].map(|bound| its?.get(bound)?.as_i64())
}

/// Returns the words that the key at the end of this path may have, if it may have no other values.
pub fn words_of(path: &[&str]) -> Vec<String> {
    let whole = whole();
    property(&whole, &whole, path).map(|its| words(&whole, its)).unwrap_or_default()
}

fn words(whole: &Value, of: &Value) -> Vec<String> {
    let refers = of.get("$ref").and_then(Value::as_str).and_then(|to| whole.pointer(to.trim_start_matches('#')));
    let parts = ["allOf", "oneOf"].into_iter().filter_map(|all| of.get(all)?.as_array()).flatten();
    let its = of.get("enum").and_then(Value::as_array).into_iter().flatten();
    let its = its.filter_map(Value::as_str).map(str::to_owned);
    its.chain(parts.chain(refers).flat_map(|part| words(whole, part))).collect()
}

/// Returns the schema of what a path leads to from the part `at` of the schema.
fn property<'a>(whole: &'a Value, at: &'a Value, path: &[&str]) -> Option<&'a Value> {
    if let Some(of) = at.get("$ref").and_then(Value::as_str) {
        return property(whole, whole.pointer(of.trim_start_matches('#'))?, path);
    }
    let Some((key, rest)) = path.split_first() else { return Some(at) };
    if let Some(next) = at.get("properties").and_then(|all| all.get(key)) {
        return property(whole, next, rest);
    }
    let either = ["allOf", "oneOf"].into_iter().filter_map(|all| at.get(all)?.as_array()).flatten();
    either.chain(at.get("items")).find_map(|part| property(whole, part, path))
}

/// Turns a schema of OpenAPI into one of JSON Schema for TOML, which has no null. No property of ours has the name of a
/// keyword that is changed here.
fn for_toml(schema: &mut Value) {
    match schema {
        Value::Array(all) => all.iter_mut().for_each(for_toml),
        Value::Object(object) => {
            without_null(object);
            // Lengths of Rust's integers.
            object.remove("format");
            if object.contains_key("properties") {
                // tasukid takes no other key anywhere; of a work, OpenAPI does not say so.
                object.insert("additionalProperties".to_owned(), json!(false));
            }
            if let Some(Value::String(of)) = object.remove("$ref") {
                let reference = json!({ "$ref": of.replace("#/components/schemas/", "#/definitions/") });
                // Beside a reference, draft 7 knows no other key.
                if object.is_empty() {
                    *schema = reference;
                    return;
                }
                object.insert("allOf".to_owned(), json!([reference]));
                return;
            }
            object.values_mut().for_each(for_toml);
        }
        _ => {}
    }
}

fn without_null(object: &mut Map<String, Value>) {
    object.retain(|key, value| key != "default" || !value.is_null());
    if let Some(Value::Array(types)) = object.get_mut("type") {
        types.retain(|of| of != "null");
        if let [one] = &mut types[..] {
            object["type"] = one.take();
        }
    }
    if let Some(Value::Array(either)) = object.get_mut("oneOf") {
        either.retain(|of| of.get("type").is_none_or(|of| of != "null"));
        if let [Value::Object(one)] = &mut either[..] {
            let one = std::mem::take(one);
            object.remove("oneOf");
            object.extend(one);
        }
    }
}
