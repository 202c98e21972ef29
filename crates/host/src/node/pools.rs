//! The node's pools: threads that serve many disks, on CPUs that the operator names.

use std::collections::BTreeMap;
use std::sync::Arc;

use cleave_api::PoolReport;
use cleave_config::Storage;
use cleave_disk::DiskSpec;
use cleave_sandbox::Role;
use cleave_worker::Pool;

use super::settings::PoolSettings;
use crate::failure::Failure;
use crate::process::confine::Confinement;
use crate::process::cpus;
use crate::service::Service;

/// The pools by their names.
#[derive(Debug, Default)]
pub(super) struct Pools(BTreeMap<String, Arc<Pool>>);

impl Pools {
    /// Starts the threads of all pools, which were checked. The calling thread leaves their CPUs to them.
    pub(super) fn start(
        specs: &[PoolSettings],
        confinement: &Confinement,
    ) -> Result<Pools, Failure> {
        cpus::stay_off(&taken_cpus(specs));
        let mut pools = BTreeMap::new();
        for PoolSettings { name, cpus } in specs {
            let pool = Pool::new(name, cpus, confinement.narrowing(Role::Pool));
            let pool = pool.map_err(|error| {
                Failure::run(format!("cannot start the threads of pool {name}: {error}"))
            })?;
            pools.insert(name.clone(), pool);
        }
        Ok(Pools(pools))
    }

    /// Returns all pools as they are shown.
    pub(super) fn report(&self) -> Vec<PoolReport> {
        let all = self.0.iter().map(|(name, pool)| PoolReport {
            name: name.clone(),
            cpus: pool.cpus().to_owned(),
        });
        all.collect()
    }

    /// Has a disk's service use the pool that its description names.
    pub(super) fn assign(&self, service: &mut Service) -> Result<(), String> {
        let Some(name) = &service.config.pool else {
            return Ok(());
        };
        let pool = self.0.get(name).ok_or_else(|| self.unknown(name))?;
        if matches!(&service.disk, Storage::One(DiskSpec::Model(_))) {
            return Err(
                "pool: a modelled disk keeps a thread busy with its own clock: leave pool out"
                    .to_owned(),
            );
        }
        let threads = u16::try_from(pool.cpus().len()).unwrap_or(u16::MAX);
        service.session.workers_max = threads.min(service.session.vrings_max);
        service.open.workers = service.session.workers_max;
        service.pool = Some(pool.clone());
        Ok(())
    }

    fn unknown(&self, name: &str) -> String {
        let names: Vec<_> = self.0.keys().map(String::as_str).collect();
        match names.is_empty() {
            true => format!("pool: there is no {name:?}: start the node with --pool {name}=CPUS"),
            false => format!(
                "pool: there is no {name:?}: the pools are {}",
                names.join(", ")
            ),
        }
    }
}

/// Refuses pools that this process cannot have.
pub(super) fn check_all(specs: &[PoolSettings]) -> Result<(), Failure> {
    check(specs, cpus::allowed().as_deref())
}

/// The CPUs of all pools.
pub(super) fn taken_cpus(specs: &[PoolSettings]) -> Vec<usize> {
    let cpus = specs.iter().flat_map(|spec| &spec.cpus);
    cpus.copied().collect()
}

/// Each CPU is at hand, and in one pool; each name is used once.
fn check(specs: &[PoolSettings], allowed: Option<&[usize]>) -> Result<(), Failure> {
    let mut taken: Vec<(usize, &str)> = Vec::new();
    for (at, PoolSettings { name, cpus }) in specs.iter().enumerate() {
        if specs.iter().take(at).any(|other| other.name == *name) {
            let line = format!("--pool: {name} is given twice");
            return Err(Failure::input(line));
        }
        for &cpu in cpus {
            if allowed.is_some_and(|allowed| !allowed.contains(&cpu)) {
                let line = format!("--pool {name}: this process may not use CPU {cpu}");
                return Err(cpus::refuse(cpu, line));
            }
            if let Some((_, other)) = taken.iter().find(|(used, _)| *used == cpu) {
                let line = format!("--pool {name}: CPU {cpu} is in pool {other} too");
                return Err(Failure::input(line));
            }
            taken.push((cpu, name));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_that_cannot_be_is_refused_in_a_line() {
        type Row<'a> = (&'a [(&'a str, &'a [usize])], &'a str);
        let rows: [Row<'_>; 4] = [
            (&[("fast", &[9])], "CPU 9"),
            (&[("a", &[0]), ("a", &[1])], "a is given twice"),
            (&[("a", &[0, 1]), ("b", &[1])], "CPU 1 is in pool a too"),
            (&[("a", &[0]), ("b", &[1, 2])], ""),
        ];
        for (pools, part) in rows {
            let pools = pools.iter().map(|(name, cpus)| PoolSettings {
                name: (*name).to_owned(),
                cpus: cpus.to_vec(),
            });
            let pools: Vec<_> = pools.collect();
            match check(&pools, Some(&[0, 1, 2])) {
                Ok(()) => assert_eq!(part, "", "{pools:?}"),
                Err(why) => {
                    let why = why.to_string();
                    assert!(!part.is_empty() && why.contains(part), "{pools:?}: {why}");
                    assert_eq!(why.lines().count(), 1, "{why}");
                }
            }
        }
    }
}
