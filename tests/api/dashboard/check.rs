//! The faults of a dashboard: of its panels, and of its queries for the metrics of a scrape.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::prometheus::{Family, Labels};

const VARIABLES: [&str; 3] = ["datasource", "instance", "disk"];
/// Grafana draws these without any plugin.
const TYPES: [&str; 2] = ["timeseries", "stat"];
/// Grafana shows a unit that it does not know as a suffix. These it knows.
const UNITS: [&str; 8] = [
    "short",
    "iops",
    "reqps",
    "ops",
    "Bps",
    "bytes",
    "s",
    "percentunit",
];
const OWN_UNIT: &str = "suffix:cores";
const INTERVALS: [&str; 2] = ["$__rate_interval", "5m"];
/// Other programs have these metrics too, so a query has to say that it means a Cleave.
const CONVENTIONAL: &str = "process_";
const OURS: &str = "cleave_build_info";
/// Prometheus adds it to each sample.
const FOREIGN: &str = "instance";

/// Gauges whose samples need an experiment of the daemon.
pub(super) const RARE: [&str; 4] = [
    "cleave_spin_gain_ratio",
    "cleave_spin_price_cores",
    "cleave_split_gain_ratio",
    "cleave_split_price_cores",
];

/// The metrics of a scrape, by their names.
pub(super) type Families = BTreeMap<String, Family>;

/// All faults, a line each.
pub(super) fn faults(dashboard: &Value, families: &Families) -> Vec<String> {
    let mut faults = variable_faults(dashboard, families);
    let panels = panels(dashboard);
    for panel in &panels {
        let found = panel_faults(panel, families);
        faults.extend(
            found
                .into_iter()
                .map(|fault| format!("{}: {fault}", panel["title"])),
        );
    }
    faults.extend(place_faults(&panels));
    let mut ids = BTreeSet::new();
    let twice = panels
        .iter()
        .filter(|panel| !ids.insert(panel["id"].as_u64()));
    faults.extend(twice.map(|panel| format!("{}: id {} twice", panel["title"], panel["id"])));
    faults
}

/// Rows, and the panels beside and in them.
fn panels(dashboard: &Value) -> Vec<&Value> {
    let mut all = Vec::new();
    for panel in inner(dashboard) {
        all.push(panel);
        all.extend(inner(panel));
    }
    all
}

fn inner(place: &Value) -> &[Value] {
    list(&place["panels"])
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn variable_faults(dashboard: &Value, families: &Families) -> Vec<String> {
    let list = dashboard["templating"]["list"].as_array().unwrap();
    let mut faults = Vec::new();
    for name in VARIABLES {
        let Some(variable) = list.iter().find(|variable| variable["name"] == name) else {
            faults.push(format!("no variable {name}"));
            continue;
        };
        if let Some(query) = variable["query"]["query"].as_str() {
            faults.extend(value_faults(query, families));
        }
    }
    faults
}

/// Returns the faults of `label_values(METRIC{...}, LABEL)`.
fn value_faults(query: &str, families: &Families) -> Vec<String> {
    let label = query
        .rsplit_once(", ")
        .map(|(_, label)| label.trim_end_matches(')'));
    let mut faults = Vec::new();
    for selector in selectors(query) {
        match Metric::find(&selector.metric, families) {
            Some(metric) => faults.extend(metric.lacks(label.unwrap_or_default())),
            None => faults.push(format!("no metric {}", selector.metric)),
        }
    }
    faults
}

fn panel_faults(panel: &Value, families: &Families) -> Vec<String> {
    let mut faults = Vec::new();
    if panel["title"]
        .as_str()
        .is_none_or(|title| title.trim().is_empty())
    {
        faults.push("no title".to_owned());
    }
    if panel["type"] == "row" {
        return faults;
    }
    if !TYPES.iter().any(|kind| panel["type"] == *kind) {
        faults.push(format!("{} is not a core panel", panel["type"]));
    }
    let unit = &panel["fieldConfig"]["defaults"]["unit"];
    if !UNITS.iter().chain([&OWN_UNIT]).any(|known| unit == known) {
        faults.push(format!("{unit} is not a unit"));
    }
    if panel["datasource"]["uid"] != "${datasource}" {
        faults.push("not the data source ${datasource}".to_owned());
    }
    let targets = list(&panel["targets"]);
    if targets.is_empty() {
        faults.push("no query".to_owned());
    }
    for target in targets {
        if target["refId"].as_str().is_none_or(str::is_empty) {
            faults.push("no refId".to_owned());
        }
        let [expr, legend] =
            ["expr", "legendFormat"].map(|field| target[field].as_str().unwrap_or_default());
        faults.extend(query_faults(expr, legend, families));
    }
    faults
}

fn query_faults(expr: &str, legend: &str, families: &Families) -> Vec<String> {
    let (selectors, groups) = (selectors(expr), groups(expr));
    let mut faults = Vec::new();
    if selectors.is_empty() {
        faults.push(format!("no metric in {expr}"));
    }
    let is_ours = selectors.iter().any(|selector| selector.metric == OURS);
    for selector in &selectors {
        let Some(metric) = Metric::find(&selector.metric, families) else {
            faults.push(format!("no metric {}", selector.metric));
            continue;
        };
        if selector.metric.starts_with(CONVENTIONAL) && !is_ours {
            faults.push(format!("{} without {OURS}", selector.metric));
        }
        faults.extend(selector_faults(selector, &metric));
        for label in &groups {
            faults.extend(metric.lacks(label));
        }
    }
    if expr.contains("_bucket") && !groups.contains(&"le") {
        faults.push(format!("a quantile needs le: {expr}"));
    }
    let shown = legend
        .split("{{")
        .skip(1)
        .filter_map(|rest| Some(rest.split_once("}}")?.0.trim()));
    let lost = shown.filter(|label| !groups.contains(label));
    faults.extend(lost.map(|label| format!("no label {label} in the query of {legend}")));
    faults
}

fn selector_faults(selector: &Selector<'_>, metric: &Metric<'_>) -> Vec<String> {
    let name = &selector.metric;
    let mut faults = Vec::new();
    let is_of_disk = metric.lacks("disk").is_none();
    let variables = ["instance", "disk"].into_iter();
    for variable in variables.take(1 + usize::from(is_of_disk)) {
        let used = (variable, &*format!("${variable}"));
        if !selector.matchers.contains(&used) {
            faults.push(format!("{name} does not use ${variable}"));
        }
    }
    for (label, value) in &selector.matchers {
        faults.extend(metric.lacks(label));
        if !value.starts_with('$') {
            faults.extend(
                value
                    .split('|')
                    .filter_map(|value| metric.never_has(label, value)),
            );
        }
    }
    if let Some(interval) = selector.interval {
        if !INTERVALS.contains(&interval) {
            faults.push(format!("[{interval}] is not an interval for {name}"));
        }
        if metric.family.kind == "gauge" {
            faults.push(format!("{name} is a gauge and has no rate"));
        }
    }
    faults
}

/// Panels beyond the 24 columns, and over each other.
fn place_faults(panels: &[&Value]) -> Vec<String> {
    let mut faults = Vec::new();
    let mut taken: Vec<([u64; 4], &Value)> = Vec::new();
    for panel in panels {
        let title = &panel["title"];
        let place = ["x", "y", "w", "h"].map(|side| panel["gridPos"][side].as_u64().unwrap_or(0));
        let [x, y, w, h] = place;
        if w == 0 || h == 0 || x + w > 24 {
            faults.push(format!("{title}: beyond the grid: {place:?}"));
        }
        let over = |other: &[u64; 4]| {
            x < other[0] + other[2]
                && other[0] < x + w
                && y < other[1] + other[3]
                && other[1] < y + h
        };
        let under = taken.iter().filter(|(other, _)| over(other));
        faults.extend(under.map(|(_, other)| format!("{title} overlaps {other}")));
        taken.push((place, title));
    }
    faults
}

/// A metric of a query, as it was scraped.
struct Metric<'a> {
    name: &'a str,
    family: &'a Family,
    samples: Vec<&'a Labels>,
}

impl<'a> Metric<'a> {
    fn find(name: &'a str, families: &'a Families) -> Option<Metric<'a>> {
        let parts = ["_bucket", "_sum", "_count"];
        let part = parts.iter().find_map(|part| {
            let family = families.get(name.strip_suffix(part)?)?;
            (family.kind == "histogram").then_some((family, *part))
        });
        let whole = || {
            families
                .get(name)
                .filter(|family| family.kind != "histogram")
        };
        let (family, part) = part.or_else(|| Some((whole()?, "")))?;
        let samples = family.samples.iter().filter(|(suffix, ..)| suffix == part);
        let samples = samples.map(|(_, labels, _)| labels).collect();
        Some(Metric {
            name,
            family,
            samples,
        })
    }

    /// The fault that the samples have no such label. Metrics of results that take the daemon minutes have no samples
    /// here; their labels are those of the manual.
    fn lacks(&self, label: &str) -> Option<String> {
        let has = match self.samples.first() {
            Some(_) => self.samples.iter().any(|labels| labels.contains_key(label)),
            None => label == "disk" || manual_labels(self.name).contains(&label),
        };
        (!has && label != FOREIGN).then(|| format!("{} has no label {label}", self.name))
    }

    /// The fault that no sample has this value of the label.
    fn never_has(&self, label: &str, value: &str) -> Option<String> {
        let has = self
            .samples
            .iter()
            .any(|labels| labels.get(label).is_some_and(|found| found == value));
        (!has).then(|| format!("{}: no sample with {label}={value}", self.name))
    }
}

/// The labels of a rare metric in docs/metrics.md.
fn manual_labels(metric: &str) -> Vec<&'static str> {
    let rows = include_str!("../../../docs/metrics.md").lines();
    let mut rows =
        rows.filter(|row| RARE.contains(&metric) && row.contains(&format!("`{metric}`")));
    let cell = rows.next().and_then(|row| row.split('|').nth(3));
    cell.unwrap_or_default()
        .split('`')
        .skip(1)
        .step_by(2)
        .collect()
}

/// A metric in a query, with what selects its samples.
struct Selector<'a> {
    metric: String,
    matchers: Vec<(&'a str, &'a str)>,
    interval: Option<&'a str>,
}

fn selectors(expr: &str) -> Vec<Selector<'_>> {
    let is_inner = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let starts = ["cleave_", CONVENTIONAL].into_iter();
    let starts = starts.flat_map(|prefix| expr.match_indices(prefix));
    let starts = starts.filter(|(at, _)| !expr[..*at].ends_with(is_inner));
    starts.map(|(at, _)| selector(&expr[at..])).collect()
}

fn selector(text: &str) -> Selector<'_> {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let (metric, rest) = text.split_at(end.unwrap_or(text.len()));
    let braces = rest.strip_prefix('{').and_then(|rest| rest.split_once('}'));
    let (inner, rest) = braces.unwrap_or(("", rest));
    let matchers = inner.split(',').filter_map(|pair| {
        let (label, value) = pair.split_once('=')?;
        Some((label, value.trim_start_matches('~').trim_matches('"')))
    });
    let interval = rest.strip_prefix('[').and_then(|rest| rest.split_once(']'));
    Selector {
        metric: metric.to_owned(),
        matchers: matchers.collect(),
        interval: interval.map(|(interval, _)| interval),
    }
}

/// The labels that are left after aggregation.
fn groups(expr: &str) -> Vec<&str> {
    let lists = expr
        .split(" by (")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'));
    lists.flat_map(|(list, _)| list.split(", ")).collect()
}
