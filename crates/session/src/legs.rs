//! Totals of a stripe's legs since the daemon started, logged at the end of a session.

use cleave_worker::LegTotals;

use crate::state::SessionState;

/// Logs one line, and with `--log debug` one per leg.
pub(crate) fn log_totals(state: &SessionState) {
    let totals = state.device.leg_totals();
    let disk = &state.device.disk;
    if !state.has_owned || totals.iter().all(|leg| *leg == LegTotals::default()) {
        return;
    }
    for (leg, totals) in disk.legs().iter().zip(&totals) {
        tracing::debug!("leg {}: {}", leg.name(), line(totals));
    }
    let names = disk.legs().iter().map(|leg| leg.name());
    if let Some(summary) = summary(names.zip(&totals)) {
        let name = disk.name();
        let logs = &state.device.logs;
        logs.legs
            .log(|more| tracing::info!("{name}: {summary}{more}"));
    }
}

fn line(leg: &LegTotals) -> String {
    format!(
        "{} reads, {} writes, {} others, {} failed, {} bytes; mean {} us, longest {} us",
        leg.reads,
        leg.writes,
        leg.others,
        leg.failed,
        leg.bytes,
        leg.latency_mean_ns() / 1000,
        leg.latency_max_ns / 1000
    )
}

/// Returns how evenly the load was spread, and which leg is slowest.
fn summary<'a>(legs: impl Iterator<Item = (&'a str, &'a LegTotals)> + Clone) -> Option<String> {
    let count = legs.clone().count();
    let bytes = || legs.clone().map(|(_, leg)| leg.bytes);
    let failed: u64 = legs.clone().map(|(_, leg)| leg.failed).sum();
    let (slowest, totals) = legs.clone().max_by_key(|(_, leg)| leg.latency_mean_ns())?;
    Some(format!(
        "{count} legs moved {} to {} bytes each, {failed} ops failed; slowest is {slowest}: mean {} us, \
         longest {} us",
        bytes().min()?,
        bytes().max()?,
        totals.latency_mean_ns() / 1000,
        totals.latency_max_ns / 1000
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_leg_and_the_spread_are_logged() {
        let leg = |bytes, latency_ns| LegTotals {
            reads: 2,
            bytes,
            latency_ns,
            latency_max_ns: latency_ns,
            failed: 1,
            ..LegTotals::default()
        };
        let totals = [leg(8192, 10_000), leg(4096, 90_000)];
        assert_eq!(
            summary(["a", "b"].into_iter().zip(&totals)).unwrap(),
            "2 legs moved 4096 to 8192 bytes each, 2 ops failed; slowest is b: mean 45 us, longest 90 us"
        );
        assert_eq!(summary(std::iter::empty()), None);
        assert_eq!(
            line(&totals[0]),
            "2 reads, 0 writes, 0 others, 1 failed, 8192 bytes; mean 5 us, longest 10 us"
        );
    }
}
