//! Findings, and how they are printed.

use serde::Serialize;

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Severity {
    Ok,
    /// A fault that may disturb some guests, or stop the daemon when it runs as another user.
    Warning,
    /// The disk cannot be served, or not to this VMM.
    Problem,
}

/// One result of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) level: Severity,
    /// The check.
    check: &'static str,
    found: String,
    remedy: Option<String>,
}

impl Finding {
    pub(super) fn ok(check: &'static str, found: impl Into<String>) -> Finding {
        Finding {
            level: Severity::Ok,
            check,
            found: found.into(),
            remedy: None,
        }
    }

    pub(super) fn warning(
        check: &'static str,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        Finding {
            level: Severity::Warning,
            remedy: Some(remedy.into()),
            ..Finding::ok(check, found)
        }
    }

    pub(super) fn problem(
        check: &'static str,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        Finding {
            level: Severity::Problem,
            ..Finding::warning(check, found, remedy)
        }
    }
}

/// A line for each.
pub(super) fn lines(findings: &[Finding]) -> String {
    let lines = findings.iter().map(|finding| {
        let level = match finding.level {
            Severity::Ok => "OK",
            Severity::Warning => "warning",
            Severity::Problem => "problem",
        };
        let remedy = finding.remedy.as_ref().map(|remedy| format!(": {remedy}"));
        let line = format!(
            "{level:<8} {:<13} {}{}",
            finding.check,
            finding.found,
            remedy.unwrap_or_default()
        );
        // A path may hold a line feed.
        line.replace(char::is_control, "?") + "\n"
    });
    lines.collect()
}

/// `{"problems": 0, "findings": [...]}`.
pub(super) fn json(findings: &[Finding]) -> String {
    let problems = findings
        .iter()
        .filter(|found| found.level == Severity::Problem);
    let all = serde_json::json!({ "problems": problems.count(), "findings": findings });
    format!("{all:#}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_one_line_whatever_is_in_it() {
        let findings = [
            Finding::ok("kernel", "Linux 6.1"),
            Finding::problem("disk", "a\nb does not exist", "create it"),
        ];
        assert_eq!(
            lines(&findings),
            "OK       kernel        Linux 6.1\nproblem  disk          a?b does not exist: create it\n"
        );
        let json: serde_json::Value = serde_json::from_str(&json(&findings)).unwrap();
        assert_eq!(json["problems"], 1);
        assert_eq!(json["findings"][1]["level"], "problem");
        assert_eq!(json["findings"][0]["remedy"], serde_json::Value::Null);
    }
}
