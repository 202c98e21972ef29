//! The last line: how many daemons and disks are not as they should be.

/// Counts of daemons and disks.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Sums {
    pub(super) daemons: usize,
    /// Daemons that were not restarted, or cannot be.
    left: usize,
    disks: usize,
    /// Disks whose frontends have to connect again, or have not done so in time; and disks that are not served any more.
    lost: usize,
}

impl Sums {
    /// Adds a daemon. `is_left`: this command does not restart it.
    pub(super) fn add(&mut self, is_left: bool) {
        self.daemons += 1;
        self.left += usize::from(is_left);
    }

    /// Adds the disks of a daemon, of which so many are lost.
    pub(super) fn add_disks(&mut self, disks: usize, lost: usize) {
        self.disks += disks;
        self.lost += lost;
    }

    /// Returns the faults that a check has found, if there are any.
    pub(super) fn faults_ahead(&self) -> Option<String> {
        let frontends = match self.lost {
            1 => "its frontend has to connect again",
            _ => "their frontends have to connect again",
        };
        let (disks, daemons) = self.counts();
        let disks = (self.lost > 0).then(|| format!("{disks}: {frontends}"));
        let daemons =
            (self.left > 0).then(|| format!("{daemons} cannot be restarted by this command"));
        joined(disks, daemons)
    }

    /// Returns the faults that are left after the restarts, if there are any.
    pub(super) fn faults_left(&self) -> Option<String> {
        let frontends = match self.lost {
            1 => "its frontend has not connected again, or the disk is not served",
            _ => "their frontends have not connected again, or the disks are not served",
        };
        let (disks, daemons) = self.counts();
        let disks = (self.lost > 0).then(|| format!("{disks}: {frontends}"));
        let daemons =
            (self.left > 0).then(|| format!("{daemons} may not run the installed program"));
        joined(disks, daemons)
    }

    /// Returns the last line of a check without a fault.
    pub(super) fn all_well(&self) -> String {
        let disks = counted(self.disks, "disk");
        format!("{disks}: no frontend has to connect again\n")
    }

    fn counts(&self) -> (String, String) {
        let disks = counted(self.disks, "disk");
        let daemons = counted(self.daemons, "daemon");
        (
            format!("{} of {disks}", self.lost),
            format!("{} of {daemons}", self.left),
        )
    }
}

fn joined(disks: Option<String>, daemons: Option<String>) -> Option<String> {
    let faults: Vec<_> = disks.into_iter().chain(daemons).collect();
    (!faults.is_empty()).then(|| faults.join("; "))
}

fn counted(count: usize, noun: &str) -> String {
    match count {
        1 => format!("1 {noun}"),
        _ => format!("{count} {noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(daemons: &[bool], disks: usize, lost: usize) -> Sums {
        let mut sums = Sums::default();
        daemons.iter().for_each(|is_left| sums.add(*is_left));
        sums.add_disks(disks, lost);
        sums
    }

    #[test]
    fn faults_are_counted() {
        let well = sums(&[false], 4, 0);
        assert_eq!((well.faults_ahead(), well.faults_left()), (None, None));
        assert_eq!(
            well.all_well(),
            "4 disks: no frontend has to connect again\n"
        );
        let one = sums(&[false], 1, 1);
        assert_eq!(
            one.faults_ahead().unwrap(),
            "1 of 1 disk: its frontend has to connect again"
        );
        assert_eq!(
            one.faults_left().unwrap(),
            "1 of 1 disk: its frontend has not connected again, or the disk is not served"
        );
        let several = sums(&[true, false, true], 4, 2);
        assert_eq!(
            several.faults_ahead().unwrap(),
            "2 of 4 disks: their frontends have to connect again; 2 of 3 daemons cannot be restarted by this command"
        );
        let left = sums(&[true], 4, 0);
        assert_eq!(
            left.faults_left().unwrap(),
            "1 of 1 daemon may not run the installed program"
        );
    }
}
