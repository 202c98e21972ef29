//! Licences of dependencies: every expression must be satisfiable from the list of permissive ones.

use crate::metadata::Metadata;

/// Licences that ask for no more than their notice. No copyleft, also not of the weak kind.
const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Checks all that ships; says how many packages were looked at.
pub(crate) fn check(metadata: &Metadata) -> Result<String, String> {
    let shipped = metadata.shipped();
    let mut faults = Vec::new();
    for package in shipped.iter().filter_map(|id| metadata.packages.get(*id)) {
        let named = format!("{} {}", package.name, package.version);
        match &package.licence {
            None => faults.push(format!("{named}: no licence expression")),
            Some(expression) => match is_allowed(expression) {
                Ok(true) => {}
                Ok(false) => faults.push(format!("{named}: {expression} is not on the list")),
                Err(why) => faults.push(format!("{named}: {expression}: {why}")),
            },
        }
    }
    if faults.is_empty() {
        Ok(format!("{} packages", shipped.len()))
    } else {
        Err(faults.join("\n"))
    }
}

/// Whether an SPDX expression (or the old `MIT/Apache-2.0` form) can be met from `ALLOWED`.
pub(crate) fn is_allowed(expression: &str) -> Result<bool, String> {
    let spaced = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = words.as_slice();
    let verdict = any_of(&mut rest)?;
    match rest.first() {
        None => Ok(verdict),
        Some(word) => Err(format!("unexpected `{word}`")),
    }
}

// SPDX 2.3 annex D.4: WITH binds tighter than AND, AND tighter than OR.
fn any_of(rest: &mut &[&str]) -> Result<bool, String> {
    let mut verdict = all_of(rest)?;
    while accept(rest, "OR") {
        // Not `||`: the right side must be read even where the left suffices.
        verdict |= all_of(rest)?;
    }
    Ok(verdict)
}

fn all_of(rest: &mut &[&str]) -> Result<bool, String> {
    let mut verdict = one(rest)?;
    while accept(rest, "AND") {
        verdict &= one(rest)?;
    }
    Ok(verdict)
}

fn one(rest: &mut &[&str]) -> Result<bool, String> {
    if accept(rest, "(") {
        let verdict = any_of(rest)?;
        return if accept(rest, ")") {
            Ok(verdict)
        } else {
            Err("unclosed parenthesis".into())
        };
    }
    let name = name(rest)?;
    if accept(rest, "WITH") {
        let with = format!("{name} WITH {}", self::name(rest)?);
        return Ok(ALLOWED.contains(&with.as_str()));
    }
    Ok(ALLOWED.contains(&name))
}

fn name<'a>(rest: &mut &[&'a str]) -> Result<&'a str, String> {
    match rest.split_first() {
        Some((word, after)) if !["AND", "OR", "WITH", "(", ")"].contains(word) => {
            *rest = after;
            Ok(word)
        }
        _ => Err("a licence name is missing".into()),
    }
}

fn accept(rest: &mut &[&str], word: &str) -> bool {
    match rest.split_first() {
        Some((first, after)) if *first == word => {
            *rest = after;
            true
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_met_as_spdx_says() {
        let table = [
            ("MIT", true),
            ("GPL-3.0-only", false),
            ("MIT/Apache-2.0", true),
            ("MIT OR GPL-3.0-only", true),
            ("GPL-3.0-only OR MIT", true),
            ("Apache-2.0 AND BSD-3-Clause", true),
            ("Apache-2.0 AND GPL-2.0-only", false),
            ("Apache-2.0 OR BSD-3-Clause AND GPL-2.0-only", true),
            ("(Apache-2.0 OR BSD-3-Clause) AND GPL-2.0-only", false),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", true),
            ("Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT", true),
            ("GPL-2.0-only WITH Classpath-exception-2.0", false),
            ("MPL-2.0", false),
        ];
        for (expression, allowed) in table {
            assert_eq!(is_allowed(expression), Ok(allowed), "{expression}");
        }
    }

    #[test]
    fn malformed_expressions_are_refused_not_guessed() {
        for expression in [
            "",
            "MIT OR",
            "(MIT",
            "MIT)",
            "AND MIT",
            "MIT Apache-2.0",
            "MIT WITH",
        ] {
            assert!(is_allowed(expression).is_err(), "{expression:?}");
        }
    }
}
