//! The options of `cleave node`.

use std::path::PathBuf;
use std::str::FromStr;

use cleave_config::{CpuList, is_id};
use tracing::level_filters::LevelFilter;

use crate::cli::MetricsOptions;

/// Longest name of a pool.
const NAME_CHARS_MAX: usize = 32;

/// `cleave node`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeOptions {
    pub(crate) state: PathBuf,
    pub(crate) run: PathBuf,
    pub(crate) control: PathBuf,
    pub(crate) control_group: Option<String>,
    pub(crate) metrics: MetricsOptions,
    /// Folders of images; none: everywhere.
    pub(crate) images: Vec<PathBuf>,
    /// True if the process is confined.
    pub(crate) sandbox: bool,
    pub(crate) pools: Vec<PoolSpec>,
    /// True if images of Ceph clusters are served.
    pub(crate) ceph: bool,
    pub(crate) log: LevelFilter,
}

/// `--pool`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PoolSpec {
    pub(super) name: String,
    pub(super) cpus: Vec<usize>,
}

impl FromStr for PoolSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<PoolSpec, String> {
        let Some((name, list)) = text.split_once('=') else {
            return Err("write NAME=CPUS, such as fast=2-5".to_owned());
        };
        if name.len() > NAME_CHARS_MAX || !is_id(name) {
            return Err(format!(
                "'{name}' is not a name: write at most {NAME_CHARS_MAX} letters, digits, '_', '.' and '-'"
            ));
        }
        let CpuList(cpus) = list.parse()?;
        Ok(PoolSpec {
            name: name.to_owned(),
            cpus,
        })
    }
}
