//! Job files for fio in the guest. Every subject gets the same, with the same seeds.

use std::fmt::Write;

/// Loads on a disk, one after the other in a single run of fio.
pub(super) struct Jobs {
    text: String,
    seconds: f64,
    names: Vec<String>,
}

/// 60 % reads of 4 to 64 KiB: small ones most often, as files and databases do.
const MIXED: &str =
    "rw=randrw\nrwmixread=60\nbssplit=4k/40:8k/20:16k/20:32k/10:64k/10\nblockalign=4k\n";
/// Requests in flight at an offered rate: so many that a fast disk never has them all, and arrivals do not wait.
const RATE_DEPTH: u32 = 64;
/// Of one dot of the figures.
pub(super) const INTERVAL_MS: u32 = 50;
/// Between the beginning and the end of a job besides its own time, under translation.
const JOB_OVERHEAD_S: f64 = 0.5;

impl Jobs {
    /// `seed` is the same for all subjects of a round, so that they see the same requests.
    pub(super) fn new(seed: u32) -> Jobs {
        let text = format!(
            "[global]\ndirect=1\nioengine=libaio\nthread\ntime_based\nallrandrepeat=1\nrandseed={seed}\nnorandommap\n\
             group_reporting\nunified_rw_reporting=mixed\nper_job_logs=0\ndisable_clat=1\ndisable_slat=1\n\
             clat_percentiles=0\nlat_percentiles=1\npercentile_list=50:99:99.9\n"
        );
        Jobs {
            text,
            seconds: 0.0,
            names: Vec::new(),
        }
    }

    /// Unmeasured: translates the guest's code, wakes what sleeps.
    pub(super) fn warm_up(&mut self, disk: &str) {
        self.job(
            "warm",
            0.4,
            &format!("filename=/dev/{disk}\n{MIXED}iodepth=32\n"),
        );
    }

    /// Requests that arrive by chance (Poisson) at so many a second, whatever the disk does.
    pub(super) fn rate(&mut self, disk: &str, iops: u32, seconds: f64) {
        let reads = iops * 6 / 10;
        let name = rate_name(iops);
        let lines = format!(
            "filename=/dev/{disk}\n{MIXED}iodepth={RATE_DEPTH}\nrate_process=poisson\nrate_iops={reads},{}\n\
             write_lat_log=/tmp/{name}\nlog_avg_msec={INTERVAL_MS}\n",
            iops - reads
        );
        self.measured(&name, seconds, &lines);
    }

    /// As many mixed requests as the disk takes, 32 in flight.
    pub(super) fn mixed(&mut self, disk: &str, seconds: f64) {
        self.measured(
            MIXED_DEPTH,
            seconds,
            &format!("filename=/dev/{disk}\n{MIXED}iodepth=32\n"),
        );
    }

    /// 4 KiB random reads.
    pub(super) fn reads(&mut self, name: &str, disk: &str, depth: u32, seconds: f64) {
        let lines = format!("filename=/dev/{disk}\nrw=randread\nbs=4k\niodepth={depth}\n");
        self.measured(name, seconds, &lines);
    }

    /// Threads that each have one request in flight, 60 % reads.
    pub(super) fn threads(&mut self, disk: &str, count: u32, seconds: f64) {
        let lines = format!(
            "filename=/dev/{disk}\nrw=randrw\nrwmixread=60\nbs=4k\nioengine=psync\nnumjobs={count}\n"
        );
        self.job(&threads_name(count), seconds, &lines);
    }

    /// One job that reads all disks in turn.
    pub(super) fn over_all(&mut self, disks: &[String], depth: u32, seconds: f64) {
        let paths: Vec<String> = disks.iter().map(|disk| format!("/dev/{disk}")).collect();
        let lines = format!(
            "filename={}\nfile_service_type=roundrobin\nrw=randread\nbs=4k\niodepth={depth}\n",
            paths.join(":")
        );
        self.job("over-all", seconds, &lines);
    }

    /// A job for each disk, all at once.
    pub(super) fn one_each(&mut self, disks: &[String], depth: u32, seconds: f64) {
        for disk in disks {
            self.names.push(format!("disk-{disk}"));
            let _ = write!(
                self.text,
                "[disk-{disk}]\nnew_group\nruntime={}ms\nfilename=/dev/{disk}\nrw=randread\nbs=4k\niodepth={depth}\n",
                seconds * 1e3
            );
        }
        self.seconds += seconds + JOB_OVERHEAD_S;
    }

    /// The file, how long it takes where nothing stalls, and the jobs' names.
    pub(super) fn done(self) -> (String, f64, Vec<String>) {
        (self.text, self.seconds, self.names)
    }

    fn measured(&mut self, name: &str, seconds: f64, lines: &str) {
        let hooks = format!("exec_prerun=/begin {name}\nexec_postrun=/end {name}\n");
        self.job(name, seconds, &format!("{hooks}{lines}"));
    }

    fn job(&mut self, name: &str, seconds: f64, lines: &str) {
        self.names.push(name.to_owned());
        // Writing to a String does not fail.
        let _ = write!(
            self.text,
            "[{name}]\nstonewall\nruntime={}ms\n{lines}",
            seconds * 1e3
        );
        self.seconds += seconds + JOB_OVERHEAD_S;
    }
}

pub(super) const MIXED_DEPTH: &str = "mixed-32";

pub(super) fn rate_name(iops: u32) -> String {
    format!("rate-{iops}")
}

pub(super) fn threads_name(count: u32) -> String {
    format!("threads-{count}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offered_rate_is_dealt_out_to_reads_and_writes_without_loss() {
        for (iops, split) in [(500, "rate_iops=300,200"), (7, "rate_iops=4,3")] {
            let mut jobs = Jobs::new(1);
            jobs.rate("vda", iops, 1.0);
            let (text, ..) = jobs.done();
            assert!(text.contains(split), "{text}");
            assert!(text.contains("rate_process=poisson"));
        }
    }

    #[test]
    fn jobs_follow_each_other_and_their_time_adds_up() {
        let mut jobs = Jobs::new(1);
        jobs.warm_up("sda");
        jobs.mixed("sda", 1.5);
        let (text, seconds, names) = jobs.done();
        assert_eq!(text.matches("stonewall").count(), 2);
        assert!(text.contains("runtime=1500ms"));
        assert!(seconds > 1.9);
        assert_eq!(names, ["warm", MIXED_DEPTH]);
    }
}
